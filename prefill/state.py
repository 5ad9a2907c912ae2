"""The prefill room's decisions: which prompt tokens are computed next, and who may have the KV.

``state.handle(event, now) -> [command]``: no clock, no IO, no torch. An event that breaks a rule raises a
RequestError (for its sender) or ValueError (a defect) and changes nothing.

A sequence's walk (``common.lifecycle``): QUEUED until its whole prompt's blocks are free and its turn has
come; COMPUTING in fixed chunks (TetriInfer 3.3.3); COMPUTED, with its first token drawn, it waits in this
pool, which is the queue (DistServe 4.3), until its decode instance has pulled all of its KV. It is offered
there when it is computed, a long prompt already when its first chunk begins; the pulls go on beside the
chunks (``prefill.handover``), and the blocks that the transfer engine reads are pinned. A sequence that ends
with its first token is withdrawn, or was never offered. Where its decode instance refuses it then, another
one is sought, and its KV stays here meanwhile. One that ran in this instance's decode room and is to
go on elsewhere comes in COMPUTED. One that is to be decoded here is offered to nobody: once it is computed
its blocks become the decode room's (``KeepHere``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.attempts import EndedAttempts
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
from common.kv.layout import KVLayout
from common.lifecycle import PrefillPhase, next_prefill_phase
from common.messages import (
    DecodeTask,
    ErrorReply,
    FinishReason,
    GenerationRequest,
    HostProcess,
    Placement,
    PrefillTask,
    PullKV,
    SampledToken,
    SequenceMoved,
    TokenEvent,
)
from common.room_mates import RoomMates
from common.sequences import continued_with, failure_of, finish_reason_of, without_last_token
from prefill.chunks import ChunkInFlight
from prefill.events import (
    AnswerPull,
    BlocksFreed,
    CancelArrived,
    ChunkFailed,
    ChunkFinished,
    ChunkSlice,
    DecodeFound,
    DecodeInstanceGone,
    DecodeNotFound,
    DrainExpired,
    DrainStarted,
    GatewayGone,
    KeepHere,
    LayersComputed,
    OfferDeclined,
    OfferRefused,
    OfferSequence,
    PrefillCommand,
    PrefillEvent,
    PublishMove,
    PublishToken,
    PullArrived,
    RoleChanged,
    RunChunk,
    SeekDecode,
    SendFailed,
    SendFinished,
    SendKV,
    SequenceLeft,
    TaskArrived,
    TimePassed,
    WithdrawOffer,
)
from prefill.handover import HandOver, KVCursor, check_destination
from prefill.prompts import PromptQueue
from prefill.sequence import KEPT_ROOM, ROOM, PrefillSequence
from scheduler.policy.hand_over import is_layerwise, layers_per_report
from scheduler.policy.mixed_batching import prompt_tokens_beside
from scheduler.policy.prefill_batching import FillBatch, fill_chunk

STUCK_AFTER_S = 5.0
"""Whoever waits for an instance that is only busy is decoded, or ends, sooner; if not, it costs a prompt."""
NO_ROOM = ErrorReply(
    code=Overloaded.code, message="no decode instance had room, and others waited for its memory"
)
HELD_TWICE = ErrorReply(
    code=HandoverFailed.code, message="the sequence was to leave an instance that was still handing it over"
)
MAX_REFUSALS = 3
"""Of one sequence's offers, after which its KV is given up: whoever has room in word has none in deed."""


@dataclass(slots=True)
class PrefillState:
    """All sequences this instance prefills or holds for a decode instance. ``process``: whose life it is."""

    instance_id: InstanceId
    incarnation: Incarnation
    blocks: BlockAllocator
    layout: KVLayout
    eos_token_ids: tuple[int, ...]
    chunk_tokens: int
    prompts: PromptQueue
    max_waiting_requests: int
    layerwise_min_tokens: int
    fill_batch: FillBatch = fill_chunk
    is_admitting: bool = True
    process: HostProcess | None = None
    mates: RoomMates = field(default_factory=RoomMates)
    sequences: dict[BlockOwner, PrefillSequence] = field(default_factory=dict)
    chunk: ChunkInFlight = field(init=False)
    _ended: EndedAttempts = field(default_factory=EndedAttempts)

    def __post_init__(self) -> None:
        self.chunk = ChunkInFlight(self.layout.layers)

    # what others ask, changing nothing

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(sequence.remaining_tokens for sequence in self.prompts)

    @property
    def pending_requests(self) -> int:
        return len(self.prompts)

    @property
    def handovers_waiting(self) -> int:
        """Sequences whose KV waits here for a decode instance."""
        return sum(sequence.phase is PrefillPhase.COMPUTED for sequence in self.sequences.values())

    @property
    def moving(self) -> int:
        """Sequences that ran here and wait for another instance to have their KV."""
        return sum(sequence.is_moving for sequence in self.sequences.values())

    @property
    def staying(self) -> int:
        """Prompts of sequences that are to be decoded here."""
        return sum(map(self._stays, self.sequences.values()))

    @property
    def is_idle(self) -> bool:
        return not self.sequences and not self.chunk.is_computing

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        self.blocks.check()
        queued = {sequence.owner for sequence in self.prompts}
        assert len(queued) == self.pending_requests, "a sequence queues twice"
        for owner, sequence in self.sequences.items():
            assert owner == sequence.owner
            is_uncomputed = sequence.phase in (PrefillPhase.QUEUED, PrefillPhase.COMPUTING)
            assert is_uncomputed == (owner in queued) or sequence.is_cancelled
            assert sequence.computed_tokens <= sequence.request.tokens
            is_computed = sequence.phase is PrefillPhase.COMPUTED
            assert is_computed == (sequence.first_token is not None)
            is_known = sequence.is_offered or sequence.is_seeking
            assert is_known or not is_computed, "nobody knows of a computed prompt"
            assert not (sequence.is_offered and sequence.is_seeking), "offered while another is sought"
            is_used = self.chunk.computes(owner) or sequence.hand_over.is_sending
            assert is_used or not sequence.is_cancelled, "a cancelled sequence stays"
            if not sequence.is_cancelled:
                sequence.hand_over.check(self.chunk.computed_kv(sequence))
        for owner in queued:
            assert owner in self.sequences, "a queued sequence is not known"
        held = {owner for owner in self.blocks.owners() if owner.room == ROOM}
        assert held <= self.sequences.keys(), "blocks are held for a sequence that is gone"
        for piece in self.chunk.slices:
            assert piece.owner in self.sequences, "the chunk in flight computes a sequence that is gone"

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        commands: list[PrefillCommand] = []
        match event:
            case TaskArrived(task):
                self._take_in(task, now, commands)
            case SequenceLeft():
                self._take_over(event, now, commands)
            case LayersComputed(layers):
                self._take_layers(layers, commands)
            case ChunkFinished(tokens):
                self._finish_chunk(tokens, now, commands)
            case ChunkFailed(error):
                self._fail_chunk(error, commands)
            case OfferRefused():
                self._take_refusal(event, commands)
            case OfferDeclined():
                self._take_back(event, commands)
            case DecodeFound(owner, placement):
                self._offer_anew(owner, placement, commands)
            case DecodeNotFound(owner, error):
                self._give_up(owner, error, commands)
            case PullArrived(pull):
                self._take_pull(pull, commands)
            case SendFinished(owner, kv_bytes, transfer_s):
                self._finish_sending(owner, kv_bytes, transfer_s, commands)
            case SendFailed(owner, error):
                self._fail_sending(owner, error, commands)
            case CancelArrived(request_id, attempt):
                self._cancel(request_id, attempt, commands)
            case DecodeInstanceGone(instance_id, incarnation):
                gone = (instance_id, incarnation)
                self._discard_all(
                    lambda sequence: (sequence.decode_instance, sequence.decode_incarnation) == gone, commands
                )
            case GatewayGone(gateway_id):
                self._discard_all(lambda sequence: sequence.request.gateway_id == gateway_id, commands)
            case BlocksFreed():
                pass
            case TimePassed():
                self._break_circle(now, commands)
            case RoleChanged(is_prefill):
                self.is_admitting = is_prefill
            case DrainStarted():
                self.is_admitting = False
            case DrainExpired():
                self._send_back_all(commands)
        self._start_chunk(now, commands)
        return commands

    # arrivals

    def _take_in(self, task: PrefillTask, now: float, commands: list[PrefillCommand]) -> None:
        request = task.request
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        if not self.is_admitting:
            raise NoInstanceReady(f"instance {self.instance_id} admits no prompts now")
        if request.tokens == 0:
            raise InvalidRequest(f"request {request.request_id} has an empty prompt", param="prompt")
        if self._ended.is_superseded(request, self.sequences.values()):
            raise RequestCancelled(f"request {request.request_id} was cancelled before it arrived")
        if owner in self.sequences:
            return
        if self.pending_requests >= self.max_waiting_requests:
            raise Overloaded(
                f"prefill instance {self.instance_id} already has instance.max_waiting_requests ="
                f" {self.max_waiting_requests} prompts waiting",
                retry_after_s=1.0,
            )
        needed = blocks_for(request.tokens, self.layout.block_size)
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
            ),
            commands,
        )
        sequence = PrefillSequence(
            owner,
            request,
            task.decode_instance,
            task.decode_incarnation,
            now,
            self._hand_over_of(request),
            task.lengths,
        )
        self.sequences[owner] = sequence
        self.prompts.add(sequence)

    def _take_over(self, left: SequenceLeft, now: float, commands: list[PrefillCommand]) -> None:
        """A sequence that ran here is handed over like a prompt that has just been computed.

        Delivered twice, its prompt may be here still. Where nobody else knows of that one, it is forgotten;
        else an answer could mean either, so both end and the sequence is computed again.
        """
        request, last_token = without_last_token(left.request)
        owner = BlockOwner(ROOM, request.request_id, request.attempt)
        twin = self.sequences.get(owner)
        if twin is not None:
            is_known = twin.is_offered
            self._discard(twin, commands)
            if is_known or owner in self.sequences:
                self._ended.note(request.request_id, request.attempt)
                self.blocks.release(left.held_by)
                commands.append(failure_of(left.request, HELD_TWICE, can_continue=True))
                return
        self.blocks.rename(left.held_by, owner)
        sequence = PrefillSequence(
            owner,
            request,
            left.decode_instance,
            left.decode_incarnation,
            now,
            self._hand_over_of(request),
            left.lengths,
            phase=PrefillPhase.COMPUTED,
            started_s=now,
            computed_tokens=request.tokens,
            first_token=last_token,
            is_moving=True,
        )
        self.sequences[owner] = sequence
        self._offer(sequence, commands)

    def _hand_over_of(self, request: GenerationRequest) -> HandOver:
        return HandOver(request.tokens, KVCursor(self.layout.layers, self.layout.token_layer_bytes))

    # chunks

    def _start_chunk(self, now: float, commands: list[PrefillCommand]) -> None:
        """Plans the next chunk if none is in flight, and offers the long prompts that begin in it."""
        if self.chunk.is_computing:
            return
        room = prompt_tokens_beside(self.mates.policy, self.chunk_tokens, self.mates.decoding)
        ready = self._give_blocks(now, room)
        sizes = self.fill_batch([sequence.remaining_tokens for sequence in ready], room)
        slices = tuple(
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
        if not slices:
            return
        self.chunk.begin(slices)
        sequences = [self.sequences[piece.owner] for piece in slices]
        for sequence in sequences:
            if sequence.computed_tokens == 0:
                sequence.started_s = now
                if self._is_layerwise(sequence.request) and not self._stays(sequence):
                    self._offer(sequence, commands)
        tokens = sum(
            piece.tokens for piece, sequence in zip(slices, sequences, strict=True) if sequence.is_offered
        )
        layer_bytes = tokens * self.layout.token_layer_bytes
        commands.append(RunChunk(slices, layers_per_report(layer_bytes) if tokens else None))

    def _is_layerwise(self, request: GenerationRequest) -> bool:
        output_tokens = request.sampling.max_tokens - len(request.output_ids)
        return is_layerwise(request.tokens, output_tokens, self.layerwise_min_tokens)

    def _give_blocks(self, now: float, chunk_tokens: int) -> list[PrefillSequence]:
        """The window's head for as long as blocks last, enough for a chunk: nobody who has yet to get any
        overtakes a prompt that waits for memory."""
        ready: list[PrefillSequence] = []
        tokens, is_full, owed = 0, False, self.mates.owed_blocks(now)
        self.mates.wanted_blocks = 0
        for sequence in self.prompts.window(now):
            if tokens >= chunk_tokens:
                break
            if sequence.phase is PrefillPhase.QUEUED:
                if is_full:
                    continue
                needed = blocks_for(sequence.request.tokens, self.layout.block_size)
                has_room = self.blocks.free_blocks - needed >= owed
                if not (has_room and self.blocks.try_allocate(sequence.owner, needed)):
                    is_full = True
                    # Who has waited so long gives way to nobody.
                    self.mates.wanted_blocks = 0 if owed else needed
                    continue
                sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.COMPUTING)
            ready.append(sequence)
            tokens += sequence.remaining_tokens
        return ready

    def _take_layers(self, layers: int, commands: list[PrefillCommand]) -> None:
        self.chunk.take_layers(layers)
        for piece in self.chunk.slices:
            self._go_on_sending(self.sequences[piece.owner], commands)

    def _finish_chunk(
        self, tokens: tuple[SampledToken | None, ...], now: float, commands: list[PrefillCommand]
    ) -> None:
        for piece, token in zip(self.chunk.end(tokens), tokens, strict=True):
            sequence = self.sequences[piece.owner]
            sequence.computed_tokens += piece.tokens
            if sequence.is_cancelled:
                self._let_go(sequence)
                continue
            if token is not None:
                self._finish_prompt(sequence, token, now, commands)
            if not sequence.is_cancelled:
                self._go_on_sending(sequence, commands)

    def _finish_prompt(
        self, sequence: PrefillSequence, token: SampledToken, now: float, commands: list[PrefillCommand]
    ) -> None:
        request = sequence.request
        finish: FinishReason | None = finish_reason_of(
            request, len(request.output_ids), token, self.eos_token_ids
        )
        self.prompts.remove(sequence)
        commands.append(
            PublishToken(
                request.gateway_id,
                TokenEvent(request.request_id, request.attempt, len(request.output_ids), token, finish),
                queue_s=sequence.started_s - sequence.arrived_s,
                compute_s=now - sequence.started_s,
            )
        )
        sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.COMPUTED)
        sequence.first_token = token.token_id
        if finish is not None:
            self._discard(sequence, commands)
        elif self._stays(sequence):
            self._keep_here(sequence, commands)
        elif not sequence.is_offered:
            self._offer(sequence, commands)

    def _fail_chunk(self, error: ErrorReply, commands: list[PrefillCommand]) -> None:
        for piece in self.chunk.end(None):
            sequence = self.sequences[piece.owner]
            if not sequence.is_cancelled:
                commands.append(failure_of(sequence.request, error, can_continue=False))
            self._discard(sequence, commands)

    # hand-over

    def _stays(self, sequence: PrefillSequence) -> bool:
        """Whether it is to be decoded here."""
        return sequence.decode_instance == self.instance_id

    def _keep_here(self, sequence: PrefillSequence, commands: list[PrefillCommand]) -> None:
        owner = sequence.owner
        kept = BlockOwner(KEPT_ROOM, owner.request_id, owner.attempt)
        self.blocks.rename(owner, kept)
        del self.sequences[owner]
        commands.append(KeepHere(kept, self._task_of(sequence)))

    def _task_of(self, sequence: PrefillSequence) -> DecodeTask:
        """With its first token, if that is there."""
        request, token = sequence.request, sequence.first_token
        return DecodeTask(
            request=request if token is None else continued_with(request, token),
            prefill_instance=self.instance_id,
            prefill_incarnation=self.incarnation,
            kv_tokens=request.tokens,
            sender=self.process,
            lengths=sequence.lengths,
        )

    def _offer(self, sequence: PrefillSequence, commands: list[PrefillCommand]) -> None:
        sequence.is_offered = True
        commands.append(OfferSequence(sequence.owner, sequence.decode_instance, self._task_of(sequence)))

    def _take_refusal(self, refused: OfferRefused, commands: list[PrefillCommand]) -> None:
        """An early offer that only came too early is made again when the prompt is computed. One that is
        refused then, by an instance that is full or about to end, goes to another instance."""
        sequence = self.sequences.get(refused.owner)
        if sequence is None or sequence.is_cancelled or sequence.hand_over.has_begun:
            return
        is_for_others = refused.error.code in (Overloaded.code, NoInstanceReady.code)
        if refused.is_early and is_for_others:
            sequence.is_offered = False
            if sequence.phase is PrefillPhase.COMPUTED:
                self._offer(sequence, commands)
            return
        if is_for_others and sequence.first_token is not None and sequence.refusals < MAX_REFUSALS:
            sequence.is_offered, sequence.is_seeking = False, True
            sequence.refusals += 1
            request = continued_with(sequence.request, sequence.first_token)
            commands.append(SeekDecode(sequence.owner, request, sequence.decode_instance))
            return
        lost = sequence.decode_instance if refused.is_lost else None
        sequence.is_offered = refused.is_lost
        commands.append(failure_of(sequence.request, refused.error, can_continue=True, lost_instance=lost))
        self._discard(sequence, commands)

    def _take_back(self, declined: OfferDeclined, commands: list[PrefillCommand]) -> None:
        """What its decode instance has not begun with goes where there is more room."""
        sequence = self.sequences.get(declined.owner)
        if sequence is None or sequence.is_cancelled or not sequence.is_offered:
            return
        is_from_its_own = sequence.decode_instance == declined.decode_instance
        if not is_from_its_own or sequence.hand_over.has_begun or sequence.first_token is None:
            return
        sequence.is_offered, sequence.is_seeking = False, True
        request = continued_with(sequence.request, sequence.first_token)
        commands.append(SeekDecode(sequence.owner, request, declined.decode_instance, declined.wanted))

    def _offer_anew(self, owner: BlockOwner, placement: Placement, commands: list[PrefillCommand]) -> None:
        """To where the scheduler has placed the sequence now. Of one that has ended, nothing is wanted."""
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.is_seeking:
            return
        request = sequence.request
        sequence.is_seeking = False
        sequence.decode_instance = placement.decode_instance
        sequence.decode_incarnation = placement.decode_incarnation
        drawn = len(request.output_ids) + 1
        moved = SequenceMoved(request.request_id, request.attempt, placement, drawn)
        commands.append(PublishMove(request.gateway_id, moved))
        if self._stays(sequence):
            self._keep_here(sequence, commands)
        else:
            self._offer(sequence, commands)

    def _give_up(self, owner: BlockOwner, error: ErrorReply, commands: list[PrefillCommand]) -> None:
        """Nobody else has room: it is computed again where and when somebody has."""
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.is_seeking:
            return
        commands.append(failure_of(sequence.request, error, can_continue=True))
        self._discard(sequence, commands)

    def _break_circle(self, now: float, commands: list[PrefillCommand]) -> None:
        """Two instances that changed their roles may each hold, computed or run before, what waits for room
        in the other. Where nobody can be decoded here for so long, the latest of these is computed again."""
        since_s = self.mates.stuck_since_s
        if since_s is None or now - since_s < STUCK_AFTER_S:
            return
        waiting = [
            each
            for each in self.sequences.values()
            if each.phase is PrefillPhase.COMPUTED and not each.is_cancelled and not each.hand_over.has_begun
        ]
        if waiting:
            commands.append(failure_of(waiting[-1].request, NO_ROOM, can_continue=True))
            self._discard(waiting[-1], commands)

    def _take_pull(self, pull: PullKV, commands: list[PrefillCommand]) -> None:
        if pull.prefill_incarnation != self.incarnation:
            raise InstanceLost(f"{self.instance_id} has begun anew since it computed that KV")
        sequence = self.sequences.get(BlockOwner(ROOM, pull.request_id, pull.attempt))
        if sequence is None or sequence.is_cancelled:
            if sequence is not None or self._ended.includes(pull.request_id, pull.attempt):
                raise RequestCancelled(f"request {pull.request_id} has ended at {self.instance_id}")
            raise UnknownRequest(f"no KV of request {pull.request_id} waits at {self.instance_id}")
        if not sequence.is_offered:
            raise UnknownRequest(f"the KV of request {pull.request_id} has not been offered")
        check_destination(pull, blocks_for(sequence.request.tokens, self.layout.block_size))
        answered = sequence.hand_over.take_ask(pull)
        if answered is not None:
            commands.append(AnswerPull(sequence.owner, pull.portion, answered))
        self._go_on_sending(sequence, commands)

    def _go_on_sending(self, sequence: PrefillSequence, commands: list[PrefillCommand]) -> None:
        """Sends what is there for the portion asked for, or answers it."""
        owner, hand_over = sequence.owner, sequence.hand_over
        pull = hand_over.asked
        if pull is None:
            return
        spans = hand_over.begin_send(self.chunk.computed_kv(sequence))
        if spans:
            self.blocks.pin(owner)
            needed = blocks_for(sequence.request.tokens, self.layout.block_size)
            source = tuple(self.blocks.block_table(owner)[:needed])
            commands.append(SendKV(owner, pull, source, spans))
        elif (answer := hand_over.try_answer(sequence.first_token)) is not None:
            commands.append(AnswerPull(owner, pull.portion, answer))
            if answer.is_last:
                self._drop(sequence)

    def _finish_sending(
        self, owner: BlockOwner, kv_bytes: int, transfer_s: float, commands: list[PrefillCommand]
    ) -> None:
        sequence = self._end_sending(owner)
        sequence.hand_over.end_send(kv_bytes, transfer_s)
        if sequence.is_cancelled:
            self._answer_ended(sequence, commands)
            self._let_go(sequence)
        else:
            self._go_on_sending(sequence, commands)

    def _fail_sending(self, owner: BlockOwner, error: ErrorReply, commands: list[PrefillCommand]) -> None:
        """The decode instance, which is told, tells the gateway."""
        sequence = self._end_sending(owner)
        pull = sequence.hand_over.give_up()
        commands.append(AnswerPull(owner, pull.portion, error))
        if sequence.is_cancelled:
            self._let_go(sequence)
            return
        sequence.is_offered = False
        self._discard(sequence, commands)

    def _end_sending(self, owner: BlockOwner) -> PrefillSequence:
        sequence = self.sequences.get(owner)
        if sequence is None or not sequence.hand_over.is_sending:
            raise ValueError(f"{owner} is not being sent")
        self.blocks.unpin(owner)
        return sequence

    def _answer_ended(self, sequence: PrefillSequence, commands: list[PrefillCommand]) -> None:
        """Whoever waits for a portion waits in vain."""
        if sequence.hand_over.asked is not None:
            pull = sequence.hand_over.give_up()
            error = ErrorReply(
                RequestCancelled.code, f"request {pull.request_id} has ended at {self.instance_id}"
            )
            commands.append(AnswerPull(sequence.owner, pull.portion, error))

    # endings

    def _cancel(self, request_id: RequestId, attempt: int, commands: list[PrefillCommand]) -> None:
        self._ended.note(request_id, attempt)
        self._discard_all(
            lambda sequence: (
                sequence.request.request_id == request_id and sequence.request.attempt <= attempt
            ),
            commands,
        )

    def _send_back_all(self, commands: list[PrefillCommand]) -> None:
        error = ErrorReply(NoInstanceReady.code, f"instance {self.instance_id} is draining")
        for sequence in list(self.sequences.values()):
            if not sequence.is_cancelled:
                commands.append(failure_of(sequence.request, error, can_continue=True))
                self._discard(sequence, commands)

    def _discard_all(
        self, matches: Callable[[PrefillSequence], bool], commands: list[PrefillCommand]
    ) -> None:
        for sequence in [sequence for sequence in self.sequences.values() if matches(sequence)]:
            self._discard(sequence, commands)

    def _discard(self, sequence: PrefillSequence, commands: list[PrefillCommand]) -> None:
        """The sequence has ended, and its gateway knows; its decode instance is told."""
        if sequence.is_cancelled:
            self._let_go(sequence)
            return
        self.prompts.remove(sequence)
        if sequence.is_offered:
            self._ended.note(sequence.request.request_id, sequence.request.attempt)
            commands.append(WithdrawOffer(sequence.owner, sequence.decode_instance))
        if not sequence.hand_over.is_sending:
            self._answer_ended(sequence, commands)
        self._let_go(sequence)

    def _let_go(self, sequence: PrefillSequence) -> None:
        """Forgets a sequence now, or marks it where the engine or the transfer still uses its blocks."""
        if self.chunk.computes(sequence.owner) or sequence.hand_over.is_sending:
            sequence.is_cancelled = True
        else:
            self._drop(sequence)

    def _drop(self, sequence: PrefillSequence) -> None:
        del self.sequences[sequence.owner]
        if sequence.phase is not PrefillPhase.QUEUED:
            self.blocks.release(sequence.owner)
