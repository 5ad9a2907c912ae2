"""The newest placements and why: what `lamella explain` and the scheduler's ``/decisions`` answer from."""

from dataclasses import dataclass, field

import msgspec

from common.ids import InstanceId, RequestId, request_id_of
from scheduler.policy.dispatch import DecodeCandidate, Scored

MOST_CHOICES = 128
"""Of one call."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One rule's: everybody it scored, and whom it took; None: nobody, for ``reason``. Of a decode choice
    ``loads``, what was known of each, and the ``tpot_s`` that was promised: what is known of an instance is
    one object until it changes, so that keeping it costs a reference."""

    policy: str
    candidates: tuple[Scored, ...]
    taken: InstanceId | None
    reason: str | None = None
    loads: tuple[DecodeCandidate, ...] = ()
    tpot_s: float | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where one attempt of a request went. ``prompt_tokens`` include ``drawn_tokens``, which it drew before;
    ``predicted_tokens``: the mean of what it was expected to draw in all; ``output_tokens``: what it drew,
    once it has ended by itself. ``at_s``: on this scheduler's clock."""

    request_id: RequestId
    attempt: int
    at_s: float
    prompt_tokens: int
    predicted_tokens: float
    choices: tuple[Choice, ...] = ()
    output_tokens: int | None = None
    drawn_tokens: int = 0


@dataclass(slots=True)
class DecisionLog:
    """Of ``kept`` requests, the newest attempt of each."""

    kept: int
    _decisions: dict[RequestId, Decision] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        self._decisions.pop(decision.request_id, None)
        self._decisions[decision.request_id] = decision
        while len(self._decisions) > self.kept:
            del self._decisions[next(iter(self._decisions))]

    def end(self, request_id: RequestId, output_tokens: int) -> None:
        decision = self._decisions.get(request_id)
        if decision is not None:
            self._decisions[request_id] = msgspec.structs.replace(decision, output_tokens=output_tokens)

    def find(self, call_id: str) -> list[Decision]:
        """Of all choices of a client's call; none where they are forgotten, or another scheduler's."""
        found = []
        for choice in range(MOST_CHOICES):
            decision = self._decisions.get(request_id_of(call_id, choice))
            if decision is not None:
                found.append(decision)
        return found

    def newest(self, count: int) -> list[Decision]:
        """The newest first."""
        return list(self._decisions.values())[: -count - 1 : -1] if count > 0 else []
