"""The requests of a gateway as an operator may see them: the open ones, and the newest that ended. Probes,
that no user waits for, are not among them.

Ids, counts and times; never a text, a token or anything of a client. The page, ``lamella top`` and
``/api/requests`` show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import msgspec

from common.ids import InstanceId, RequestId
from gateway.generation import Generation
from gateway.history import History, Span

RequestEnd = Literal["finished", "failed", "refused", "left"]
RequestPhase = Literal["queue", "prefill", "transfer", "decode", "recovery", RequestEnd]
"""``left``: its client did. ``failed`` after it was accepted, ``refused`` before."""

KEPT = 256
"""Ended requests that are remembered."""
SHOWN_RUNNING = 500
SHOWN_ENDED = 100


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """``age_s``: since its arrival, of one that ended how long it took. ``error``: the error's code."""

    id: RequestId
    phase: RequestPhase
    service_class: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    attempt: int
    prefill_instance: InstanceId | None
    decode_instance: InstanceId | None
    age_s: float
    ttft_s: float | None
    tpot_s: float | None
    finish_reason: str | None = None
    error: str | None = None


class RequestList(msgspec.Struct, frozen=True):
    """``running``: the oldest first; ``ended``: the newest first. No more than can be looked at."""

    running: list[RequestView]
    ended: list[RequestView]


class RequestTimeline(msgspec.Struct, frozen=True):
    request: RequestView
    spans: list[Span]


@dataclass(slots=True)
class RequestLog:
    """``open``: the journal's entries. ``changes`` grows with every arrival, end and change of phase."""

    open: Mapping[RequestId, Generation]
    changes: int = 0
    _ended: dict[RequestId, tuple[RequestView, History]] = field(default_factory=dict)

    def note_change(self) -> None:
        self.changes += 1

    def end(self, generation: Generation, now: float, *, is_refused: bool) -> None:
        """Keeps what may be seen of it; its tokens and its prompt are let go."""
        generation.history.note_end(now)
        if generation.is_probe:
            return
        view = _view(generation, end_of(generation, is_refused), now)
        self._ended[generation.request.request_id] = (view, generation.history)
        while len(self._ended) > KEPT:
            del self._ended[next(iter(self._ended))]
        self.note_change()

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self.open

    def newest(self, now: float) -> RequestList:
        users = (each for each in self.open.values() if not each.is_probe)
        running = [_view(each, phase_of(each), now) for each in islice(users, SHOWN_RUNNING)]
        ended = [view for view, _ in islice(reversed(self._ended.values()), SHOWN_ENDED)]
        return RequestList(running, ended)

    def find(self, name: str, now: float) -> RequestTimeline | None:
        """By its id, or that of the answer that its client has, ``chatcmpl-…`` or ``cmpl-…``."""
        request_id = RequestId(name.removeprefix("chat").removeprefix("cmpl-"))
        generation = self.open.get(request_id)
        if generation is not None:
            view = _view(generation, phase_of(generation), now)
            return RequestTimeline(view, generation.history.spans())
        if request_id in self._ended:
            view, history = self._ended[request_id]
            return RequestTimeline(view, history.spans())
        return None


def phase_of(generation: Generation) -> RequestPhase:
    """Of one that is open."""
    history, placement = generation.history, generation.placement
    if history.is_broken:
        return "recovery"
    if history.is_decoding:
        return "decode"
    # Tokens may overtake the word of the placement.
    if generation.first_token_s is not None:
        return "transfer"
    return "queue" if placement is None else "prefill"


def end_of(generation: Generation, is_refused: bool) -> RequestEnd:
    if is_refused:
        return "refused"
    if generation.error is not None:
        return "failed"
    return "left" if generation.finish_reason is None else "finished"


def _view(generation: Generation, phase: RequestPhase, now: float) -> RequestView:
    request, placement = generation.request, generation.placement
    return RequestView(
        id=request.request_id,
        phase=phase,
        service_class=request.service_class,
        prompt_tokens=len(request.prompt_ids),
        output_tokens=len(generation.output_ids),
        max_tokens=request.sampling.max_tokens,
        attempt=request.attempt,
        prefill_instance=None if placement is None else placement.prefill_instance,
        decode_instance=None if placement is None else placement.decode_instance,
        age_s=now - generation.arrived_s,
        ttft_s=generation.ttft_s,
        tpot_s=generation.tpot_s,
        finish_reason=generation.finish_reason,
        error=None if generation.error is None else generation.error.code,
    )
