"""The prefill room's decisions: which prompt tokens are computed next, and who may have the KV.

``state.handle(event, now) -> [command]``: no clock, no IO, no torch. An event that breaks a rule raises a
RequestError (for its sender) or ValueError (a defect) and changes nothing.

A sequence's walk (``common.lifecycle``): QUEUED until its whole prompt's blocks are free and its turn has
come; COMPUTING in fixed chunks (TetriInfer 3.3.3); COMPUTED, with its first token drawn, it waits in this
pool, which is the queue (DistServe 4.3), until its decode instance has pulled all of its KV. It is offered
there when it is computed, a long prompt already when its first chunk begins, unless which instance that is is
to be asked when it is computed (``scheduler.policy.decode_binding``); the pulls go on beside the
chunks (``prefill.handover``), and the blocks that the transfer engine reads are pinned. A sequence that ends
with its first token is withdrawn, or was never offered. Where its decode instance refuses it then, another
one is sought, and its KV stays here meanwhile. One that ran in this instance's decode room and is to
go on elsewhere comes in COMPUTED. One that is to be decoded here is offered to nobody: once it is computed
its blocks become the decode room's (``KeepHere``).
"""

from dataclasses import dataclass, field

from common.attempts import EndedAttempts
from common.errors import NoInstanceReady
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from common.kv.layout import KVLayout
from common.lifecycle import PrefillPhase, next_prefill_phase
from common.messages import ErrorReply, FinishReason, GenerationRequest, HostProcess, SampledToken, TokenEvent
from common.room_mates import RoomMates
from common.sequences import failure_of, finish_reason_of
from prefill.arrivals import Arrivals
from prefill.batching import Batching
from prefill.chunks import ChunksInFlight
from prefill.entering import Entering
from prefill.events import (
    BlocksFreed,
    CancelArrived,
    ChunkAdvanced,
    ChunkFailed,
    ChunkFinished,
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
    PassDue,
    PrefillCommand,
    PrefillEvent,
    PublishToken,
    PullArrived,
    RoleChanged,
    RunChunk,
    SendFailed,
    SendFinished,
    SequenceLeft,
    TaskArrived,
    TimePassed,
)
from prefill.holdings import Holdings
from prefill.offers import Offers
from prefill.prompts import PromptQueue
from prefill.sends import Sends
from prefill.sequence import PrefillSequence
from scheduler.policy.hand_over import is_layerwise, layers_per_report
from scheduler.policy.prefill_batching import FillBatch, fill_chunk

COMPUTED = PrefillPhase.COMPUTED


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
    chunks: ChunksInFlight = field(init=False)
    held: Holdings = field(init=False)
    offers: Offers = field(init=False)
    arrivals: Arrivals = field(init=False)
    batching: Batching = field(init=False)
    sends: Sends = field(init=False)

    def __post_init__(self) -> None:
        blocks, prompts, layout = self.blocks, self.prompts, self.layout
        self.chunks = ChunksInFlight(layout.layers)
        self.held = Holdings(self.instance_id, self.sequences, blocks, prompts, self.chunks, EndedAttempts())
        self.offers = Offers(self.instance_id, self.incarnation, self.process, self.held)
        self.arrivals = Arrivals(layout, self.max_waiting_requests, self.held, self.offers)
        entering = Entering(prompts, blocks, layout.block_size, self.mates, self.instance_id)
        self.mates.begun = entering.begun
        self.batching = Batching(
            prompts,
            blocks,
            self.mates,
            self.chunk_tokens,
            self.fill_batch,
            self.chunks,
            entering,
        )
        self.sends = Sends(self.incarnation, layout.block_size, self.held)

    # what others ask, changing nothing

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return self.prompts.remaining_tokens if self.prompts.count else 0

    @property
    def pending_requests(self) -> int:
        return self.prompts.count

    @property
    def handovers_waiting(self) -> int:
        """Sequences whose KV waits here for a decode instance."""
        # In a loop: every report asks, of few.
        waiting = 0
        for sequence in self.sequences.values():
            waiting += sequence.phase is COMPUTED
        return waiting

    @property
    def moving(self) -> int:
        """Sequences that ran here and wait for another instance to have their KV."""
        return sum(sequence.is_moving for sequence in self.sequences.values())

    @property
    def staying(self) -> int:
        """Prompts of sequences that are to be decoded here."""
        return sum(map(self.offers.stays, self.sequences.values()))

    @property
    def is_idle(self) -> bool:
        return not self.sequences and not self.chunks.is_computing

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        assert self.mates.is_engine_taken or not self.mates.is_chunk_due, (
            "nobody asks for a chunk that is due"
        )
        self.held.check()

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        commands = self._take(event, now)
        mates = self.mates
        if mates.wanting is not None and mates.wanting not in self.sequences:
            # Its client has left, or it goes elsewhere: nobody gives way to it, even amid a chunk.
            mates.want_nothing()
        if self.chunks.can_begin:
            mates.is_chunk_due = False
            if self.prompts.count:
                staying = sum([isinstance(each, KeepHere) for each in commands])
                if isinstance(event, PassDue) or mates.may_choose_chunk(staying):
                    commands = [*commands, *self._start_chunk(staying, now)]
                else:
                    mates.is_chunk_due = True
            else:
                mates.want_nothing()
        mates.is_computing, mates.waiting_prompts = self.chunks.is_computing, self.prompts.count
        return commands

    def _take(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        match event:
            # The commonest come first.
            case TaskArrived(task):
                if not self.is_admitting:
                    raise NoInstanceReady(f"instance {self.instance_id} admits no prompts now")
                return self.arrivals.take_in(task, now)
            case ChunkFinished(tokens):
                return self._finish_chunk(tokens, now)
            case PullArrived(pull):
                return self.sends.take_pull(pull, now)
            case SendFinished(owner, kv_bytes, transfer_s):
                return self.sends.finish(owner, kv_bytes, transfer_s)
            case SequenceLeft():
                return self.arrivals.take_over(event, now)
            case ChunkAdvanced():
                self.chunks.advance()
            case LayersComputed(layers):
                return self._take_layers(layers)
            case ChunkFailed(error):
                return self._fail_chunk(error)
            case OfferRefused():
                return self.offers.take_refusal(event)
            case OfferDeclined():
                return self.offers.take_back(event)
            case DecodeFound(owner, placement):
                return self.offers.offer_anew(owner, placement)
            case DecodeNotFound(owner, error):
                return self.offers.give_up(owner, error)
            case SendFailed(owner, error):
                return self.sends.fail(owner, error)
            case CancelArrived(request_id, attempt):
                return self._cancel(request_id, attempt)
            case DecodeInstanceGone(instance_id, incarnation):
                gone = (instance_id, incarnation)
                return self.held.discard_all(
                    lambda sequence: (sequence.decode_instance, sequence.decode_incarnation) == gone
                )
            case GatewayGone(gateway_id):
                return self.held.discard_all(lambda sequence: sequence.request.gateway_id == gateway_id)
            case BlocksFreed() | PassDue():
                pass
            case TimePassed():
                return self.offers.break_circle(self.mates.stuck_since_s, now)
            case RoleChanged(is_prefill):
                self.is_admitting = is_prefill
            case DrainStarted():
                self.is_admitting = False
            case DrainExpired():
                return self._send_back_all()
        return []

    # chunks

    def _start_chunk(self, staying: int, now: float) -> list[PrefillCommand]:
        """Plans the next chunk, where one can begin, and offers the long prompts that begin in it.
        ``staying``: sequences that are about to be decoded beside it."""
        slices = self.batching.next_slices(staying, now)
        if not slices:
            return []
        self.chunks.begin(slices)
        commands: list[PrefillCommand] = []
        sequences = [self.sequences[piece.owner] for piece in slices]
        for sequence in sequences:
            if sequence.computed_tokens == 0:
                sequence.started_s = now
                if self._is_layerwise(sequence.request) and self.offers.is_for_others(sequence):
                    commands.append(self.offers.offer(sequence))
        tokens = sum(
            piece.tokens for piece, sequence in zip(slices, sequences, strict=True) if sequence.is_offered
        )
        layer_bytes = tokens * self.layout.token_layer_bytes
        return [*commands, RunChunk(slices, layers_per_report(layer_bytes) if tokens else None)]

    def _is_layerwise(self, request: GenerationRequest) -> bool:
        output_tokens = request.sampling.max_tokens - len(request.output_ids)
        return is_layerwise(request.tokens, output_tokens, self.layerwise_min_tokens)

    def _take_layers(self, layers: int) -> list[PrefillCommand]:
        self.chunks.take_layers(layers)
        sequences = [self.sequences[piece.owner] for piece in self.chunks.slices]
        return [command for sequence in sequences for command in self.sends.go_on(sequence)]

    def _finish_chunk(self, tokens: tuple[SampledToken | None, ...], now: float) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = []
        for piece, token in zip(self.chunks.end(tokens), tokens, strict=True):
            sequence = self.sequences[piece.owner]
            sequence.computed_tokens += piece.tokens
            if sequence.is_cancelled:
                self.held.let_go(sequence)
                continue
            if token is not None:
                commands += self._finish_prompt(sequence, token, now)
            if not sequence.is_cancelled:
                commands += self.sends.go_on(sequence)
        return commands

    def _finish_prompt(
        self, sequence: PrefillSequence, token: SampledToken, now: float
    ) -> list[PrefillCommand]:
        request = sequence.request
        finish: FinishReason | None = finish_reason_of(
            request, len(request.output_ids), token, self.eos_token_ids
        )
        self.prompts.remove(sequence)
        published = PublishToken(
            request.gateway_id,
            TokenEvent(request.request_id, request.attempt, len(request.output_ids), token, finish),
            queue_s=sequence.started_s - sequence.arrived_s,
            compute_s=now - sequence.started_s,
        )
        sequence.phase = next_prefill_phase(sequence.phase, PrefillPhase.COMPUTED)
        sequence.first_token, sequence.computed_s = token.token_id, now
        if finish is not None:
            return [published, *self.held.discard(sequence)]
        return (
            [published]
            if sequence.is_offered
            else [
                published,
                self.offers.hand_over(sequence, token.token_id),
            ]
        )

    def _fail_chunk(self, error: ErrorReply) -> list[PrefillCommand]:
        commands: list[PrefillCommand] = []
        for piece in self.chunks.end(None):
            sequence = self.sequences[piece.owner]
            if not sequence.is_cancelled:
                commands.append(failure_of(sequence.request, error, can_continue=False))
            commands += self.held.discard(sequence)
        return commands

    # endings

    def _cancel(self, request_id: RequestId, attempt: int) -> list[PrefillCommand]:
        self.held.ended.note(request_id, attempt)
        return self.held.discard_all(
            lambda sequence: sequence.request.request_id == request_id and sequence.request.attempt <= attempt
        )

    def _send_back_all(self) -> list[PrefillCommand]:
        error = ErrorReply(NoInstanceReady.code, f"instance {self.instance_id} is draining")
        commands: list[PrefillCommand] = []
        for sequence in [each for each in self.sequences.values() if not each.is_cancelled]:
            commands.append(failure_of(sequence.request, error, can_continue=True))
            commands += self.held.discard(sequence)
        return commands
