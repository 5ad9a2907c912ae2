"""What befell one request and when: the spans of its timeline.

Pure: told the time, on the gateway's clock. A token costs one addition to an array; everything else happens
a few times a request. Work is told by instances the moment it ends (``WorkDone``), so its end is the time at
which it is heard of, and no two machines' clocks are compared. Holds no text and no token.
"""

from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from common.ids import InstanceId
from common.messages.work import Work

SpanKind = Literal["queue", "prefill", "transfer", "decode", "recovery"]

MOST_SPANS = 1024
"""Of one request, beside its decode steps; what comes later is left out."""


class Span(msgspec.Struct, frozen=True):
    """Seconds from the request's arrival; ``end_s`` None: it still lasts.

    ``queue`` is at the scheduler without an ``instance``. ``transfer``: KV from ``peer``. ``decode``: a stay
    at an instance, with the end of each step; a step begins where the last one ended. ``recovery``: from the
    last token, work or queue of an attempt that broke (``cause``) to the next token. That it broke may be
    noticed much later (``noticed_s``); what is done for it from then on has spans of its own.
    """

    kind: SpanKind
    begin_s: float
    end_s: float | None
    attempt: int = 0
    instance: InstanceId | None = None
    peer: InstanceId | None = None
    tokens: int = 0
    kv_bytes: int = 0
    cause: str | None = None
    noticed_s: float | None = None
    step_ends_s: list[float] = []


class Break(NamedTuple):
    """Of the latest attempt. ``began_s``: the last sign of it."""

    began_s: float
    noticed_s: float
    cause: str

    def as_span(self, end_s: float | None, attempt: int) -> Span:
        return Span("recovery", self.began_s, end_s, attempt, cause=self.cause, noticed_s=self.noticed_s)


@dataclass(slots=True)
class Stay:
    """At one instance, while it decodes."""

    instance: InstanceId
    attempt: int
    begin_s: float
    step_ends_s: "array[float]" = field(default_factory=lambda: array("f"))

    def as_span(self, is_over: bool) -> Span:
        ends_s = self.step_ends_s.tolist()
        return Span(
            "decode",
            self.begin_s,
            ends_s[-1] if is_over else None,
            self.attempt,
            self.instance,
            tokens=len(ends_s),
            step_ends_s=ends_s,
        )


@dataclass(slots=True)
class History:
    """``arrived_s``: on the clock that the others' ``now`` is of."""

    arrived_s: float
    attempt: int = 0
    ended_s: float | None = None
    _spans: list[Span] = field(default_factory=list)
    _stays: list[Stay] = field(default_factory=list)
    _queued_at: InstanceId | None = None
    _queued_since_s: float | None = 0.0
    _broken: Break | None = None
    _is_prompt_due: bool = False
    _worked_s: float = 0.0

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    @property
    def is_decoding(self) -> bool:
        """In this attempt."""
        return bool(self._stays) and self._stays[-1].attempt == self.attempt

    def note_placed(self, now: float, prefill_instance: InstanceId) -> None:
        """It waits there from now on, unless word of its work has come before."""
        self._end_queue(now - self.arrived_s)
        if not self._is_prompt_due and not self.is_decoding:
            self._queued_at, self._queued_since_s = prefill_instance, now - self.arrived_s

    def note_work(self, now: float, instance: InstanceId, work: Work) -> None:
        """Of an earlier attempt, too: it was done."""
        end_s = now - self.arrived_s
        begin_s = max(0.0, end_s - work.took_s)
        if work.attempt == self.attempt:
            self._end_queue(begin_s)
            self._is_prompt_due |= work.kind == "prefill"
        self._worked_s = end_s
        self._add(
            Span(work.kind, begin_s, end_s, work.attempt, instance, work.peer, work.tokens, work.kv_bytes)
        )

    def note_token(self, now: float, instance: InstanceId) -> bool:
        """Taken in from that instance; whether it was the first of an attempt, or there. The first after a
        prompt is the prompt's, and no step."""
        at_s = now - self.arrived_s
        stays = self._stays
        if self._broken is None and self._queued_since_s is None and stays:
            stay = stays[-1]
            if stay.instance == instance and stay.attempt == self.attempt:
                stay.step_ends_s.append(at_s)
                return False
        self._note_first(at_s, instance)
        return True

    def note_broken(self, now: float, cause: str) -> None:
        """The attempt; the next one begins."""
        at_s = now - self.arrived_s
        last_sign_s = at_s if self._queued_since_s is not None else min(at_s, self._last_sign_s)
        self._end_queue(at_s)
        if self._broken is None:
            self._broken = Break(last_sign_s, at_s, cause)
        self._is_prompt_due = False
        self._queued_at, self._queued_since_s = None, at_s

    def note_end(self, now: float) -> None:
        self.ended_s = now - self.arrived_s
        self._end_queue(self.ended_s)
        self._end_recovery(self.ended_s)

    def spans(self) -> list[Span]:
        """By their begins; what lasts has no end."""
        spans = list(self._spans)
        for stay in self._stays:
            is_current = stay is self._stays[-1] and not self._broken and self.ended_s is None
            spans.append(stay.as_span(is_over=not is_current))
        if self._queued_since_s is not None and self.ended_s is None:
            spans.append(Span("queue", self._queued_since_s, None, self.attempt, self._queued_at))
        if self._broken is not None:
            spans.append(self._broken.as_span(None, self.attempt))
        return sorted(spans, key=lambda span: span.begin_s)

    @property
    def _last_sign_s(self) -> float:
        """The end of the last work or step that was heard of."""
        last_step_s = self._stays[-1].step_ends_s[-1] if self._stays else 0.0
        return max(last_step_s, self._worked_s)

    def _note_first(self, at_s: float, instance: InstanceId) -> None:
        """Of an attempt, or at an instance."""
        self._end_queue(at_s)
        self._end_recovery(at_s)
        if self._is_prompt_due:
            self._is_prompt_due, self._worked_s = False, at_s
            return
        stay = Stay(instance, self.attempt, min(at_s, self._last_sign_s))
        stay.step_ends_s.append(at_s)
        self._stays.append(stay)

    def _end_queue(self, at_s: float) -> None:
        if self._queued_since_s is None:
            return
        begin_s, self._queued_since_s = self._queued_since_s, None
        self._add(Span("queue", begin_s, max(begin_s, at_s), self.attempt, self._queued_at))

    def _end_recovery(self, at_s: float) -> None:
        if self._broken is None:
            return
        broken, self._broken = self._broken, None
        self._add(broken.as_span(at_s, self.attempt))

    def _add(self, span: Span) -> None:
        if len(self._spans) < MOST_SPANS:
            self._spans.append(span)
