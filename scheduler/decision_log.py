"""The newest placements and why: what `lamella explain` and the scheduler's ``/decisions`` answer from."""

from dataclasses import dataclass, field

import msgspec

from common.ids import InstanceId, RequestId, request_id_of
from common.messages import Phase
from scheduler.policy.candidates import DecodeCandidate, Scored

MOST_CHOICES = 128
"""Of one call."""
MOST_FORMER = 8
"""Of one request."""


class Barred(msgspec.Struct, frozen=True, gc=False):
    """An instance of the phase that was no candidate, and the reason, for people."""

    instance_id: InstanceId
    reason: str


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One rule's: everybody it scored (the least is the best; a refused one says which constraint it breaks),
    and whom it took; None: nobody, for ``reason``. ``predicted_s``: what the request was to see of the one
    that was taken, TTFT of prefill and TPOT of decode; None where that one had measured nothing yet. Of a
    decode choice ``loads``, what was known of each, and the ``tpot_s`` that was promised: what is known of an
    instance is one object until it changes, so that keeping it costs a reference. ``barred``: who has the
    phase and was not scored; nobody of another scheduler's group, nor who was just tried in vain."""

    phase: Phase
    policy: str
    candidates: tuple[Scored, ...]
    taken: InstanceId | None
    reason: str | None = None
    predicted_s: float | None = None
    loads: tuple[DecodeCandidate, ...] = ()
    tpot_s: float | None = None
    barred: tuple[Barred, ...] = ()


class Former(msgspec.Struct, frozen=True, gc=False):
    """Where a request was to be before it was placed anew: instances of another attempt, or of the same one
    those that did not take it or that it left. None: it was not to be anywhere in that phase."""

    attempt: int
    prefill: InstanceId | None
    decode: InstanceId | None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where one attempt of a request went. ``at_s``: on this scheduler's clock, over HTTP seconds since
    1970. ``prompt_tokens`` include ``drawn_tokens``, which it drew before; ``predicted_tokens``: the mean of
    what it was expected to draw in all. ``is_over``: the attempt has ended, by itself, its client left or
    it broke. The outcome of one that ended by itself is what the request drew, and the TTFT and TPOT that its
    gateway measured of all of it, whatever was drawn by attempts before (no TPOT with fewer than two tokens).
    ``former``: where it was to be before, the oldest first. ``waited_s``: since it had come, or lost
    the place that it had, until somebody had taken it or nobody could."""

    request_id: RequestId
    attempt: int
    at_s: float
    prompt_tokens: int
    predicted_tokens: float
    choices: tuple[Choice, ...] = ()
    service_class: str = "default"
    drawn_tokens: int = 0
    is_over: bool = False
    output_tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    former: tuple[Former, ...] = ()
    waited_s: float = 0.0

    def taken(self, phase: Phase) -> InstanceId | None:
        """Where it is to be in that phase, by the last choice that took anybody."""
        taken = (each.taken for each in reversed(self.choices) if each.phase == phase)
        return next(filter(None, taken), None)

    def has(self, phase: Phase) -> bool:
        return any(choice.phase == phase for choice in self.choices)

    def concerns(self, instance_id: str) -> bool:
        """Whether it took that instance, or could have."""
        scored = (each for choice in self.choices for each in choice.candidates)
        return any(each.instance_id == instance_id for each in scored)


@dataclass(slots=True)
class DecisionLog:
    """Of ``kept`` requests, the newest attempt of each."""

    kept: int
    _decisions: dict[RequestId, Decision] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        """In the place of what was decided before; of the same attempt, where it is prefilled stays known."""
        former = self._decisions.pop(decision.request_id, None)
        self._decisions[decision.request_id] = decision if former is None else _after(former, decision)
        while len(self._decisions) > self.kept:
            del self._decisions[next(iter(self._decisions))]

    def end(
        self, request_id: RequestId, output_tokens: int, ttft_s: float | None, tpot_s: float | None
    ) -> Decision | None:
        """The decision with its outcome; None where it is forgotten, or another scheduler's."""
        decision = self._decisions.get(request_id)
        if decision is None:
            return None
        ended = msgspec.structs.replace(
            decision, is_over=True, output_tokens=output_tokens, ttft_s=ttft_s, tpot_s=tpot_s
        )
        self._decisions[request_id] = ended
        return ended

    def note_wait(self, request_id: RequestId, attempt: int, waited_s: float) -> None:
        """Until the attempt's placement was over, where one has been decided."""
        decision = self._decisions.get(request_id)
        if decision is not None and decision.attempt == attempt:
            self._decisions[request_id] = msgspec.structs.replace(decision, waited_s=waited_s)

    def end_early(self, request_id: RequestId, attempt: int) -> None:
        """Its client left, or that attempt broke."""
        decision = self._decisions.get(request_id)
        if decision is not None and decision.attempt <= attempt:
            self._decisions[request_id] = msgspec.structs.replace(decision, is_over=True)

    def find(self, call_id: str) -> list[Decision]:
        """Of all choices of a client's call; none where they are forgotten, or another scheduler's."""
        found = []
        for choice in range(MOST_CHOICES):
            decision = self._decisions.get(request_id_of(call_id, choice))
            if decision is not None:
                found.append(decision)
        return found

    def newest(
        self, count: int, service_class: str | None = None, instance_id: str | None = None
    ) -> list[Decision]:
        """The newest first; only those of a class, or that looked at an instance, where one is given."""
        found: list[Decision] = []
        for decision in reversed(self._decisions.values()):
            if len(found) >= count:
                break
            is_of_class = service_class is None or decision.service_class == service_class
            if is_of_class and (instance_id is None or decision.concerns(instance_id)):
                found.append(decision)
        return found


def _after(former: Decision, decision: Decision) -> Decision:
    choices, before, waited_s = decision.choices, former.former, decision.waited_s
    prefill, decode = former.taken("prefill"), former.taken("decode")
    if former.attempt == decision.attempt and not decision.has("prefill"):
        # Where nobody has room for one that was to move, it stays.
        phases = ("prefill",) if decision.taken("decode") else ("prefill", "decode")
        choices = (*(each for each in former.choices if each.phase in phases), *choices)
        waited_s = former.waited_s
        has_left = decode is not None and decision.taken("decode") not in (None, decode)
    else:
        has_left = prefill is not None or decode is not None
    if has_left:
        before = (*before, Former(former.attempt, prefill, decode))[-MOST_FORMER:]
    return msgspec.structs.replace(decision, choices=choices, former=before, waited_s=waited_s)
