"""The gateways and their clients: who comes when, what each has been given, and who asks again.

Delivery and retries are as ``gateway.attempts`` and ``gateway.journal`` have them, without the wire.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.errors import InstanceLost, RequestError
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.latency import tpot_s, ttft_s
from common.messages import (
    CancelRequest,
    GenerationRequest,
    InstanceGone,
    Placement,
    RequestEnded,
    SamplingParams,
    SequenceFailed,
    SequenceMoved,
    ServiceRecord,
    TokenEvent,
)
from gateway.continuing import (
    CONTINUE_BACKOFF_S,
    CONTINUE_DEADLINE_S,
    FOR_LATER,
    backoff_s,
    broken_text,
    chosen_since_s,
    continuations_after,
    wait_s,
)
from gateway.losses import Losses, is_needed
from services.simulator.gaps import GapCounts
from services.simulator.network import Network
from services.simulator.records import Outcome, Records, request_id_of
from services.simulator.refusal import Refusal, count_refusal

GATEWAY = GatewayId("gateway")
RECORD = ServiceRecord(
    service_id=GATEWAY, incarnation=Incarnation("1"), kind="gateway", host="simulated", pid=1, http_url=""
)
TOKEN, END_TOKEN = 0, 1
"""All that is ever drawn: a token, and that which ends an output before its ``max_tokens``."""
NO_WAIT_RETRY_S = 1.0
PROMPTS_KEPT = 1 << 10
"""Lengths of prompts."""


class Entry(msgspec.Struct, eq=False):
    """One open request. ``length``: what it is going to draw. ``drawn``: what its client has; ``fresh``: of
    this attempt. ``newest_s``: when the last token came that is known of; ``broke_s``: when this attempt's
    predecessor broke; ``asked_s``: when the attempt was asked for that was placed; ``continuations``: how
    many broke in a row. ``came_s``: when its client asked for it last, ``waits``: how often it has asked
    again since, as nobody was there."""

    number: int
    request: GenerationRequest
    length: int
    drawn: int = 0
    fresh: int = 0
    newest_s: float = 0.0
    slowest_gap_s: float = 0.0
    placement: Placement | None = None
    moved: Placement | None = None
    lost_instances: tuple[InstanceId, ...] = ()
    continuations: int = 0
    broke_s: float = 0.0
    asked_s: float = 0.0
    retries_left: int = 0
    came_s: float = 0.0
    waits: int = 0
    is_submitting: bool = False
    is_over: bool = False


Submit = Callable[
    [GenerationRequest, tuple[InstanceId, ...], Callable[[Placement | RequestError], None]], None
]


@dataclass(slots=True)
class Prompts:
    """All of one length are one tuple, and of the newest lengths alone one is kept."""

    _known: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def of(self, tokens: int) -> tuple[int, ...]:
        prompt = self._known.get(tokens)
        if prompt is None:
            if len(self._known) >= PROMPTS_KEPT:
                del self._known[next(iter(self._known))]
            prompt = self._known[tokens] = (TOKEN,) * tokens
        return prompt


@dataclass(slots=True)
class SimulatedGateway:
    """``submit`` and ``tell_ended`` reach a scheduler, ``cancel`` an instance. ``wait_for_instance_s``: so
    long do requests wait for which nobody is there; ``retries``: how often a client asks again after that.
    ``moves``: of sequences to other decode instances. ``refusals``: of those rejected, by their codes, and
    ``failures`` of those that broke. ``causes``: how often a sequence broke by each code. ``waiting_s``:
    request-seconds in the system until ``counted_s``, for Little's law."""

    network: Network
    records: Records
    max_continuations: int
    losses: Losses
    wait_for_instance_s: float
    retries: int = 0
    entries: dict[RequestId, Entry] = field(default_factory=dict)
    first_gaps: GapCounts = field(default_factory=GapCounts)
    moves: int = 0
    refusals: dict[str, Refusal] = field(default_factory=dict)
    failures: dict[str, Refusal] = field(default_factory=dict)
    causes: dict[str, int] = field(default_factory=dict)
    waiting_s: float = 0.0
    counted_s: float = 0.0
    _prompts: Prompts = field(default_factory=Prompts)
    submit: Submit = field(init=False)
    tell_ended: Callable[[RequestEnded], None] = field(init=False)
    cancel: Callable[[InstanceId, CancelRequest], None] = field(init=False)

    @property
    def continuations(self) -> int:
        return sum(self.causes.values())

    def start(self, prompt_tokens: int, output_tokens: int, max_tokens: int | None) -> None:
        """A client comes. ``max_tokens``: that it allows; None: as many as it is going to draw."""
        now = self.network.clock.now
        self._count(now)
        number = self.records.begin(now, prompt_tokens, output_tokens)
        allowed = output_tokens if max_tokens is None else max_tokens
        request = GenerationRequest(
            request_id=request_id_of(number),
            gateway_id=GATEWAY,
            prompt_ids=self._prompts.of(prompt_tokens),
            sampling=SamplingParams(max_tokens=allowed, ignore_eos=allowed <= output_tokens),
        )
        length = min(output_tokens, allowed)
        entry = Entry(number, request, length, retries_left=self.retries, came_s=now)
        self.entries[request.request_id] = entry
        self._submit(entry)

    def length_left(self, request: GenerationRequest, drawn: int) -> int:
        """How many more tokens it is going to draw: what only an engine and an oracle know."""
        entry = self.entries.get(request.request_id)
        return (request.sampling.max_tokens if entry is None else entry.length) - drawn

    # what instances tell

    def take_first(self, event: TokenEvent, queue_s: float) -> None:
        """Drawn by a prefill room."""
        entry = self._current(event.request_id, event.attempt)
        if entry is None:
            return
        self.records.queue_s[entry.number] += queue_s
        self._note_token(entry, event.index, self.network.clock.now)
        if event.finish_reason is not None:
            self._finish(entry, is_cut=event.finish_reason == "length")

    def take_second(self, request_id: RequestId, attempt: int, drawn: int, token_s: float) -> None:
        """The first token of a decode room, which came at ``token_s``."""
        entry = self._current(request_id, attempt)
        if entry is not None:
            self._note_token(entry, drawn - 1, token_s)

    def take_last(self, event: TokenEvent, slowest_gap_s: float) -> None:
        """The token that ends an output. ``slowest_gap_s``: since the first of the decode room that drew
        it."""
        entry = self._current(event.request_id, event.attempt)
        if entry is None:
            return
        now = self.network.clock.now
        entry.slowest_gap_s = max(entry.slowest_gap_s, slowest_gap_s)
        entry.drawn, entry.newest_s = event.index + 1, now
        self._finish(entry, is_cut=event.finish_reason == "length")

    def take_part(
        self, request_id: RequestId, attempt: int, drawn: int, token_s: float, slowest_gap_s: float
    ) -> None:
        """A decode room has drawn up to ``drawn`` tokens, the last at ``token_s``, and draws no more."""
        entry = self._current(request_id, attempt)
        if entry is not None and drawn > entry.drawn:
            entry.slowest_gap_s = max(entry.slowest_gap_s, slowest_gap_s)
            entry.fresh += drawn - entry.drawn
            entry.drawn, entry.newest_s = drawn, token_s

    def take_failure(self, failed: SequenceFailed) -> None:
        entry = self._current(failed.request_id, failed.attempt)
        if entry is None:
            return
        if failed.lost_instance is not None:
            entry.lost_instances = (*entry.lost_instances, failed.lost_instance)
        if not failed.can_continue:
            self._fail(entry, failed.error.code, failed.error.message)
            return
        self._continue(entry, failed.error.code, backoff_s(failed.error.code, entry.continuations))

    def take_move(self, message: SequenceMoved) -> None:
        entry = self._current(message.request_id, message.attempt)
        if entry is None:
            cancel = CancelRequest(message.request_id, message.attempt)
            self.cancel(message.placement.decode_instance, cancel)
            return
        self.moves += 1
        entry.moved = message.placement
        entry.fresh = 1 + entry.drawn - message.output_tokens
        if entry.placement is not None:
            entry.placement = message.placement
            since_s = chosen_since_s(entry.asked_s, self.network.clock.now)
            self._continue_if_lost(entry, entry.placement, since_s)

    def take_gone(self, gone: InstanceGone) -> None:
        self.losses.note_instance(gone, self.network.clock.now)
        for entry in list(self.entries.values()):
            placement = entry.placement
            if placement is not None and is_needed(placement, entry.fresh, gone):
                self._continue(entry, InstanceLost.code)

    # attempts

    def _current(self, request_id: RequestId, attempt: int) -> Entry | None:
        entry = self.entries.get(request_id)
        return entry if entry is not None and entry.request.attempt == attempt else None

    def _note_token(self, entry: Entry, index: int, token_s: float) -> None:
        if index < entry.drawn:
            return
        records, number = self.records, entry.number
        if index == 0:
            records.first_token_s[number] = token_s
        else:
            gap_s = token_s - entry.newest_s
            self.first_gaps.add(gap_s)
            entry.slowest_gap_s = max(entry.slowest_gap_s, gap_s)
            if index == 1:
                records.second_token_s[number] = token_s
        entry.fresh += index + 1 - entry.drawn
        entry.drawn, entry.newest_s = index + 1, token_s

    def _continue_if_lost(self, entry: Entry, placement: Placement, since_s: float) -> None:
        """Word of a loss may have overtaken that of a placement, or of a move."""
        if self.losses.find_lost(placement, entry.fresh, since_s) is not None:
            self._continue(entry, InstanceLost.code)

    def _submit(self, entry: Entry) -> None:
        entry.is_submitting = True
        request, told = entry.request, entry.lost_instances
        self.submit(
            request, told, partial(self._take_answer, entry, request, len(told), self.network.clock.now)
        )

    def _take_answer(
        self,
        entry: Entry,
        request: GenerationRequest,
        told: int,
        asked_s: float,
        reply: Placement | RequestError,
    ) -> None:
        """To what was asked at ``asked_s``, with word of ``told`` instances that it lost."""
        if entry.request is not request:
            if isinstance(reply, Placement):
                self._cancel(request, reply)
            return
        entry.is_submitting = False
        # Told once: told again, it would keep an instance that came back suspect.
        entry.lost_instances = entry.lost_instances[told:]
        if isinstance(reply, Placement):
            entry.placement, entry.asked_s = entry.moved or reply, asked_s
            if self.network.timeline is not None:
                self.network.timeline.add_placed(GATEWAY, request.request_id, self.network.clock.now)
            self.records.prefill[entry.number] = self.network.number_of(reply.prefill_instance)
            self.records.decode[entry.number] = self.network.number_of(entry.placement.decode_instance)
            if entry.is_over:
                self._tell_ended(entry)
            else:
                self._continue_if_lost(entry, entry.placement, asked_s)
        elif not entry.is_over:
            self._refused(entry, reply)

    def _refused(self, entry: Entry, refusal: RequestError) -> None:
        """A first attempt's refusal is its client's, but where nobody was there; a stream that broke is
        placed as soon as it can be."""
        is_for_later = isinstance(refusal, FOR_LATER)
        now = self.network.clock.now
        if entry.continuations and is_for_later:
            if now - entry.broke_s > CONTINUE_DEADLINE_S:
                self._fail(entry, refusal.code, refusal.message)
            else:
                self._submit_later(entry, CONTINUE_BACKOFF_S)
            return
        pause_s = wait_s(refusal, entry.waits, now - entry.came_s, self.wait_for_instance_s)
        if pause_s is not None:
            entry.waits += 1
            self._submit_later(entry, pause_s)
        elif is_for_later and entry.retries_left:
            entry.retries_left -= 1
            again_s = refusal.retry_after_s or NO_WAIT_RETRY_S
            # Of its client's it is another request.
            entry.came_s, entry.waits = now + again_s, 0
            self._submit_later(entry, again_s)
        else:
            count_refusal(self.refusals, refusal.code, refusal.message)
            self._end(entry, "rejected", refusal.code)

    def _submit_later(self, entry: Entry, delay_s: float) -> None:
        """As the next attempt."""
        old = entry.request
        request = msgspec.structs.replace(old, output_ids=(TOKEN,) * entry.drawn, attempt=old.attempt + 1)
        entry.request, entry.placement, entry.moved, entry.fresh = request, None, None, 0
        self.records.attempts[entry.number] += 1

        def submit() -> None:
            if not entry.is_over and entry.request is request:
                self._submit(entry)

        self.network.clock.after(delay_s, submit)

    def _continue(self, entry: Entry, cause: str, delay_s: float = 0.0) -> None:
        if entry.continuations >= self.max_continuations:
            self._fail(entry, InstanceLost.code, broken_text(entry.continuations, cause))
            return
        self.causes[cause] = self.causes.get(cause, 0) + 1
        if entry.placement is not None:
            self._cancel(entry.request, entry.placement)
        entry.continuations = continuations_after(entry.continuations, entry.fresh)
        entry.broke_s = self.network.clock.now
        self._submit_later(entry, delay_s)

    # ends

    def _finish(self, entry: Entry, *, is_cut: bool) -> None:
        now, number = self.network.clock.now, entry.number
        arrival_s, first_s = self.records.arrival_s[number], self.records.first_token_s[number]
        ended = RequestEnded(
            entry.request.request_id,
            prompt_tokens=len(entry.request.prompt_ids),
            output_tokens=entry.drawn,
            is_cut=is_cut,
            ttft_s=ttft_s(arrival_s, first_s),
            tpot_s=tpot_s(first_s, now, entry.drawn),
            attempt=entry.request.attempt,
        )
        if entry.drawn > 1:
            self.records.slowest_gap_s[number] = entry.slowest_gap_s
        self._close(entry, "done")
        self.tell_ended(ended)

    def _fail(self, entry: Entry, code: str, message: str) -> None:
        count_refusal(self.failures, code, message)
        self._end(entry, "failed", code)

    def _end(self, entry: Entry, outcome: Outcome, code: str) -> None:
        self.records.errors[entry.number] = code
        self._close(entry, outcome)
        self._tell_ended(entry)

    def _close(self, entry: Entry, outcome: Outcome) -> None:
        now = self.network.clock.now
        self._count(now)
        entry.is_over = True
        self.records.drawn_tokens[entry.number] = entry.drawn
        self.records.end(entry.number, outcome, now)
        del self.entries[entry.request.request_id]

    def _tell_ended(self, entry: Entry) -> None:
        request = entry.request
        if entry.placement is not None:
            self._cancel(request, entry.placement)
        self.tell_ended(RequestEnded(request.request_id, attempt=request.attempt))

    def _cancel(self, request: GenerationRequest, placement: Placement) -> None:
        cancel = CancelRequest(request.request_id, request.attempt)
        for instance_id in {placement.prefill_instance: None, placement.decode_instance: None}:
            self.cancel(instance_id, cancel)

    def _count(self, now: float) -> None:
        self.waiting_s += len(self.entries) * (now - self.counted_s)
        self.counted_s = now
