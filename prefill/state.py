"""The prefill room's decisions: which prompt tokens are computed next, and who may have the KV.

``state.handle(event, now) -> [command]``: no clock, no IO, no torch. An event that breaks a rule raises a
RequestError (for its sender) or ValueError (a defect) and changes nothing.

A sequence's walk (``common.lifecycle``): QUEUED until its whole prompt's blocks are free and its turn has
come; COMPUTING in fixed chunks (TetriInfer 3.3.3); with its first token drawn it is OFFERED to the decode
instance and waits in this pool, which is the queue (DistServe 4.3); SENDING while the transfer engine reads
its blocks, which are pinned; then gone. A sequence that ends with its first token is never offered.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config import PrefillOrder
from common.errors import (
    ContextLengthExceeded,
    HandoverFailed,
    InstanceLost,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    UnknownRequest,
)
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner, blocks_for
from common.lifecycle import PrefillPhase, next_prefill_phase
from common.messages import (
    DecodeTask,
    ErrorReply,
    FinishReason,
    GenerationRequest,
    PrefillTask,
    PullKV,
    SampledToken,
    SequenceFailed,
    TokenEvent,
)
from common.sequences import continued_with, finish_reason_of
from prefill.events import (
    CancelArrived,
    ChunkFailed,
    ChunkFinished,
    ChunkSlice,
    DecodeInstanceGone,
    DrainExpired,
    DrainStarted,
    GatewayGone,
    OfferRefused,
    OfferSequence,
    PrefillCommand,
    PrefillEvent,
    PublishFailure,
    PublishToken,
    PullArrived,
    RunChunk,
    SendFinished,
    SendKV,
    TaskArrived,
)
from scheduler.policy.prefill_batching import fill_chunk, order_window

ROOM = "prefill"
CANCELLED_REMEMBERED = 4096


@dataclass(slots=True)
class PrefillSequence:
    owner: BlockOwner
    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    arrived_s: float
    phase: PrefillPhase = PrefillPhase.QUEUED
    started_s: float = 0.0
    computed_tokens: int = 0
    is_cancelled: bool = False

    @property
    def remaining_tokens(self) -> int:
        return self.request.tokens - self.computed_tokens


@dataclass(slots=True)
class PrefillState:
    """All sequences this instance prefills or holds for a decode instance."""

    instance_id: InstanceId
    incarnation: Incarnation
    blocks: BlockAllocator
    block_size: int
    eos_token_ids: tuple[int, ...]
    chunk_tokens: int
    order: PrefillOrder
    scheduling_window: int
    max_waiting_requests: int
    is_admitting: bool = True
    sequences: dict[BlockOwner, PrefillSequence] = field(default_factory=dict)
    _arrivals: deque[PrefillSequence] = field(default_factory=deque)
    _window: list[PrefillSequence] = field(default_factory=list)
    _chunk: tuple[ChunkSlice, ...] = ()
    _cancelled: OrderedDict[RequestId, int] = field(default_factory=OrderedDict)

    # what others ask, changing nothing

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(sequence.remaining_tokens for sequence in self._uncomputed())

    @property
    def pending_requests(self) -> int:
        return len(self._arrivals) + len(self._window)

    @property
    def handovers_waiting(self) -> int:
        """Sequences whose KV waits here for a decode instance."""
        return sum(
            sequence.phase in (PrefillPhase.OFFERED, PrefillPhase.SENDING)
            for sequence in self.sequences.values()
        )

    @property
    def is_idle(self) -> bool:
        return not self.sequences and not self._chunk

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        self.blocks.check()
        queued = {sequence.owner for sequence in (*self._arrivals, *self._window)}
        assert len(queued) == self.pending_requests, "a sequence queues twice"
        for owner, sequence in self.sequences.items():
            assert owner == sequence.owner
            is_uncomputed = sequence.phase in (PrefillPhase.QUEUED, PrefillPhase.COMPUTING)
            assert is_uncomputed == (owner in queued) or sequence.is_cancelled
            assert sequence.computed_tokens <= sequence.request.tokens
        for owner in queued:
            assert owner in self.sequences, "a queued sequence is not known"
        held = {owner for owner in self.blocks.owners() if owner.room == ROOM}
        assert held <= self.sequences.keys(), "blocks are held for a sequence that is gone"
        for piece in self._chunk:
            assert piece.owner in self.sequences, "the chunk in flight computes a sequence that is gone"

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        commands: list[PrefillCommand] = []
        match event:
            case TaskArrived(task):
                self._take_in(task, now)
            case ChunkFinished(tokens):
                self._finish_chunk(tokens, now, commands)
            case ChunkFailed(error):
                self._fail_chunk(error, commands)
            case OfferRefused():
                self._withdraw_offer(event, commands)
            case PullArrived(pull):
                commands.append(self._start_sending(pull))
            case SendFinished(owner):
                self._finish_sending(owner)
            case CancelArrived(request_id, attempt):
                self._cancel(request_id, attempt)
            case DecodeInstanceGone(instance_id, incarnation):
                gone = (instance_id, incarnation)
                self._discard_all(
                    lambda sequence: (sequence.decode_instance, sequence.decode_incarnation) == gone
                )
            case GatewayGone(gateway_id):
                self._discard_all(lambda sequence: sequence.request.gateway_id == gateway_id)
            case DrainStarted():
                self.is_admitting = False
            case DrainExpired():
                self._send_back_all(commands)
        self._start_chunk(now, commands)
        return commands

    # arrivals

    def _take_in(self, task: PrefillTask, now: float) -> None:
        request = task.request
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        if not self.is_admitting:
            raise NoInstanceReady(f"instance {self.instance_id} admits no prompts now")
        if request.tokens == 0:
            raise InvalidRequest(f"request {request.request_id} has an empty prompt", param="prompt")
        if self._is_superseded(request):
            raise RequestCancelled(f"request {request.request_id} was cancelled before it arrived")
        if owner in self.sequences:
            return
        if self.pending_requests >= self.max_waiting_requests:
            raise Overloaded(
                f"prefill instance {self.instance_id} already has instance.max_waiting_requests ="
                f" {self.max_waiting_requests} prompts waiting",
                retry_after_s=1.0,
            )
        needed = blocks_for(request.tokens, self.block_size)
        if needed > self.blocks.total_blocks:
            raise ContextLengthExceeded(
                f"the prompt's {request.tokens} tokens need {needed} KV blocks; instance"
                f" {self.instance_id} has {self.blocks.total_blocks}",
                param="prompt",
            )
        self._discard_all(
            lambda sequence: (
                sequence.request.request_id == request.request_id
                and sequence.request.attempt < request.attempt
            )
        )
        sequence = PrefillSequence(owner, request, task.decode_instance, task.decode_incarnation, now)
        self.sequences[owner] = sequence
        self._arrivals.append(sequence)

    def _is_superseded(self, request: GenerationRequest) -> bool:
        """Whether this attempt is cancelled, or a higher one of the same request is here already."""
        if self._cancelled.get(request.request_id, -1) >= request.attempt:
            return True
        return any(
            known.request.request_id == request.request_id
            and (
                known.request.attempt > request.attempt
                or (known.is_cancelled and known.request.attempt == request.attempt)
            )
            for known in self.sequences.values()
        )

    # chunks

    def _uncomputed(self) -> list[PrefillSequence]:
        return [*self._window, *self._arrivals]

    def _start_chunk(self, now: float, commands: list[PrefillCommand]) -> None:
        """Plans the next chunk if none is in flight."""
        if self._chunk:
            return
        self._refill_window()
        ready = self._give_blocks(now)
        sizes = fill_chunk([sequence.remaining_tokens for sequence in ready], self.chunk_tokens)
        self._chunk = tuple(
            ChunkSlice(
                owner=sequence.owner,
                request=sequence.request,
                start=sequence.computed_tokens,
                tokens=tokens,
                block_table=tuple(self.blocks.block_table(sequence.owner)),
                is_last=tokens == sequence.remaining_tokens,
            )
            for sequence, tokens in zip(ready, sizes, strict=False)
        )
        if self._chunk:
            commands.append(RunChunk(self._chunk))

    def _refill_window(self) -> None:
        if self._window or not self._arrivals:
            return
        batch = [self._arrivals.popleft() for _ in range(min(self.scheduling_window, len(self._arrivals)))]
        order = order_window([sequence.remaining_tokens for sequence in batch], self.order)
        self._window = [batch[index] for index in order]

    def _give_blocks(self, now: float) -> list[PrefillSequence]:
        """The window's head for as long as blocks last: nobody overtakes a prompt that waits for memory."""
        ready: list[PrefillSequence] = []
        tokens = 0
        for sequence in self._window:
            if tokens >= self.chunk_tokens:
                break
            if sequence.phase is PrefillPhase.QUEUED:
                needed = blocks_for(sequence.request.tokens, self.block_size)
                if not self.blocks.try_allocate(sequence.owner, needed):
                    break
                sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.COMPUTING)
                sequence.started_s = now
            ready.append(sequence)
            tokens += sequence.remaining_tokens
        return ready

    def _finish_chunk(
        self, tokens: tuple[SampledToken | None, ...], now: float, commands: list[PrefillCommand]
    ) -> None:
        for piece, token in zip(self._chunk, tokens, strict=False):
            if piece.is_last != (token is not None):
                raise ValueError(f"{piece.owner}: is_last is {piece.is_last}, the drawn token {token}")
        chunk = self._end_chunk(len(tokens))
        for piece, token in zip(chunk, tokens, strict=True):
            sequence = self.sequences[piece.owner]
            sequence.computed_tokens += piece.tokens
            if sequence.is_cancelled:
                self._discard(sequence)
            elif token is not None:
                self._finish_prompt(sequence, token, now, commands)

    def _finish_prompt(
        self, sequence: PrefillSequence, token: SampledToken, now: float, commands: list[PrefillCommand]
    ) -> None:
        request = sequence.request
        finish: FinishReason | None = finish_reason_of(
            request, len(request.output_ids), token, self.eos_token_ids
        )
        self._window.remove(sequence)
        commands.append(
            PublishToken(
                request.gateway_id,
                TokenEvent(request.request_id, request.attempt, len(request.output_ids), token, finish),
                queue_s=sequence.started_s - sequence.arrived_s,
                compute_s=now - sequence.started_s,
            )
        )
        if finish is not None:
            self._drop(sequence)
            return
        sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.OFFERED)
        task = DecodeTask(
            request=continued_with(request, token),
            prefill_instance=self.instance_id,
            prefill_incarnation=self.incarnation,
            kv_tokens=request.tokens,
        )
        commands.append(OfferSequence(sequence.owner, sequence.decode_instance, task))

    def _fail_chunk(self, error: ErrorReply, commands: list[PrefillCommand]) -> None:
        for piece in self._end_chunk(len(self._chunk)):
            sequence = self.sequences[piece.owner]
            if not sequence.is_cancelled:
                commands.append(_failure(sequence, error, can_continue=False))
            self._discard(sequence)

    def _end_chunk(self, slices: int) -> tuple[ChunkSlice, ...]:
        if not self._chunk or len(self._chunk) != slices:
            raise ValueError(f"a chunk of {slices} slices ended, {len(self._chunk)} are in flight")
        chunk, self._chunk = self._chunk, ()
        return chunk

    # hand-over

    def _withdraw_offer(self, refused: OfferRefused, commands: list[PrefillCommand]) -> None:
        sequence = self.sequences.get(refused.owner)
        if sequence is None or sequence.phase is not PrefillPhase.OFFERED:
            return
        lost = sequence.decode_instance if refused.is_lost else None
        commands.append(_failure(sequence, refused.error, can_continue=True, lost_instance=lost))
        self._drop(sequence)

    def _start_sending(self, pull: PullKV) -> SendKV:
        if pull.prefill_incarnation != self.incarnation:
            raise InstanceLost(f"{self.instance_id} has begun anew since it computed that KV")
        owner = BlockOwner(ROOM, pull.request_id, pull.attempt)
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.phase is not PrefillPhase.OFFERED:
            raise UnknownRequest(f"no KV of request {pull.request_id} waits at {self.instance_id}")
        needed = blocks_for(sequence.request.tokens, self.block_size)
        if len(pull.blocks) < needed:
            raise UnknownRequest(f"{len(pull.blocks)} blocks offered for KV that fills {needed}")
        if not pull.destinations:
            raise HandoverFailed("the pool that the KV was for is gone")
        total_blocks = min(each.total_blocks for each in pull.destinations)
        if len({*pull.blocks} & {*range(total_blocks)}) < len(pull.blocks):
            raise InvalidRequest(f"{pull.blocks} are not of a pool of {total_blocks}", param="blocks")
        sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.SENDING)
        self.blocks.pin(owner)
        source = tuple(self.blocks.block_table(owner)[:needed])
        return SendKV(owner, pull, source, kv_tokens=sequence.request.tokens)

    def _finish_sending(self, owner: BlockOwner) -> None:
        sequence = self.sequences.get(owner)
        if sequence is None or sequence.phase is not PrefillPhase.SENDING:
            raise ValueError(f"{owner} is not being sent")
        self.blocks.unpin(owner)
        self._drop(sequence)

    # endings

    def _cancel(self, request_id: RequestId, attempt: int) -> None:
        self._cancelled[request_id] = max(attempt, self._cancelled.pop(request_id, -1))
        while len(self._cancelled) > CANCELLED_REMEMBERED:
            self._cancelled.popitem(last=False)
        self._discard_all(
            lambda sequence: sequence.request.request_id == request_id and sequence.request.attempt <= attempt
        )

    def _send_back_all(self, commands: list[PrefillCommand]) -> None:
        error = ErrorReply(NoInstanceReady.code, f"instance {self.instance_id} is draining")
        for sequence in list(self.sequences.values()):
            if not sequence.is_cancelled:
                commands.append(_failure(sequence, error, can_continue=True))
            self._discard(sequence)

    def _discard_all(self, matches: Callable[[PrefillSequence], bool]) -> None:
        for sequence in [sequence for sequence in self.sequences.values() if matches(sequence)]:
            self._discard(sequence)

    def _discard(self, sequence: PrefillSequence) -> None:
        """Forgets a sequence now, or marks it where the engine or the transfer still uses its blocks."""
        is_in_chunk = any(piece.owner == sequence.owner for piece in self._chunk)
        if sequence in self._window:
            self._window.remove(sequence)
        elif sequence in self._arrivals:
            self._arrivals.remove(sequence)
        if is_in_chunk or sequence.phase is PrefillPhase.SENDING:
            sequence.is_cancelled = True
        else:
            self._drop(sequence)

    def _drop(self, sequence: PrefillSequence) -> None:
        del self.sequences[sequence.owner]
        if sequence.phase is not PrefillPhase.QUEUED:
            self.blocks.release(sequence.owner)


def _failure(
    sequence: PrefillSequence,
    error: ErrorReply,
    *,
    can_continue: bool,
    lost_instance: InstanceId | None = None,
) -> PublishFailure:
    request = sequence.request
    return PublishFailure(
        request.gateway_id,
        SequenceFailed(request.request_id, request.attempt, error, can_continue, lost_instance),
    )
