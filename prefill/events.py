"""What can happen to the prefill room (events) and what it may ask for (commands). Values only."""

import msgspec

from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockOwner
from common.kv.layout import KVSpan
from common.lengths import LengthDistribution
from common.messages import (
    DecodeTask,
    ErrorReply,
    GenerationRequest,
    KVDelivered,
    Placement,
    PrefillTask,
    PullKV,
    SampledToken,
    SequenceMoved,
    TokenEvent,
)
from common.sequences import PublishFailure


class TaskArrived(msgspec.Struct, frozen=True, gc=False):
    task: PrefillTask


class SequenceLeft(msgspec.Struct, frozen=True, gc=False):
    """This instance's decode room has given a running sequence up: it is to go on at another instance.
    ``held_by``: who holds its blocks, which are this room's from now on. ``request.output_ids``: all that was
    drawn; the last has no KV yet."""

    held_by: BlockOwner
    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    lengths: LengthDistribution | None


class LayersComputed(msgspec.Struct, frozen=True, gc=False):
    """The K and V of the chunk in flight, the oldest where there are several, stand in the pool, in its first
    ``layers`` layers."""

    layers: int


class ChunkAdvanced(msgspec.Struct, frozen=True, gc=False):
    """The chunk that began last has left the first stage of a pipeline: the next one may follow it."""


class ChunkFinished(msgspec.Struct, frozen=True, gc=False):
    """One entry per slice of the chunk in flight, the oldest where there are several; a token where the slice
    ended its prompt."""

    tokens: tuple[SampledToken | None, ...]


class ChunkFailed(msgspec.Struct, frozen=True, gc=False):
    """The oldest."""

    error: ErrorReply


class OfferRefused(msgspec.Struct, frozen=True, gc=False):
    """The decode instance did not take the sequence over. ``is_lost``: it did not even answer. ``is_early``:
    the offer was made before the first token was there."""

    owner: BlockOwner
    error: ErrorReply
    is_lost: bool = False
    is_early: bool = False


class OfferDeclined(msgspec.Struct, frozen=True, gc=False):
    """A decode instance gives back what it was offered: ``wanted`` has more room."""

    owner: BlockOwner
    decode_instance: InstanceId
    wanted: InstanceId


class DecodeFound(msgspec.Struct, frozen=True, gc=False):
    """Another decode instance expects the sequence now."""

    owner: BlockOwner
    placement: Placement


class DecodeNotFound(msgspec.Struct, frozen=True, gc=False):
    """``error``: why no other decode instance takes the sequence."""

    owner: BlockOwner
    error: ErrorReply


class PullArrived(msgspec.Struct, frozen=True, gc=False):
    pull: PullKV


class SendFinished(msgspec.Struct, frozen=True, gc=False):
    """Every byte of the portion in the air has arrived."""

    owner: BlockOwner
    kv_bytes: int
    transfer_s: float


class SendFailed(msgspec.Struct, frozen=True, gc=False):
    """The portion has not arrived; nothing of it is sent any more."""

    owner: BlockOwner
    error: ErrorReply


class CancelArrived(msgspec.Struct, frozen=True, gc=False):
    request_id: RequestId
    attempt: int


class DecodeInstanceGone(msgspec.Struct, frozen=True, gc=False):
    instance_id: InstanceId
    incarnation: Incarnation


class GatewayGone(msgspec.Struct, frozen=True, gc=False):
    gateway_id: GatewayId


class BlocksFreed(msgspec.Struct, frozen=True, gc=False):
    """By the instance's other room: who waits for memory here may go on."""


class PassDue(msgspec.Struct, frozen=True, gc=False):
    """The engine asks for the next chunk: its turn has come (``RoomMates.is_chunk_due``)."""


class RoleChanged(msgspec.Struct, frozen=True, gc=False):
    """``is_prefill``: prompts are admitted from now on; else only those that are here are finished."""

    is_prefill: bool


class TimePassed(msgspec.Struct, frozen=True, gc=False):
    """Now and then."""


class DrainStarted(msgspec.Struct, frozen=True, gc=False):
    """Admit nothing more; finish what is here."""


class DrainExpired(msgspec.Struct, frozen=True, gc=False):
    """The time to finish is over: everything goes back to be placed elsewhere."""


PrefillEvent = (
    TaskArrived
    | SequenceLeft
    | LayersComputed
    | ChunkAdvanced
    | ChunkFinished
    | ChunkFailed
    | OfferRefused
    | OfferDeclined
    | DecodeFound
    | DecodeNotFound
    | PullArrived
    | SendFinished
    | SendFailed
    | CancelArrived
    | DecodeInstanceGone
    | GatewayGone
    | BlocksFreed
    | PassDue
    | TimePassed
    | RoleChanged
    | DrainStarted
    | DrainExpired
)


class ChunkSlice(msgspec.Struct, frozen=True, gc=False):
    """Compute ``tokens`` positions of a prompt from ``start``; draw a token when it ends there."""

    owner: BlockOwner
    request: GenerationRequest
    start: int
    tokens: int
    block_table: tuple[int, ...]
    is_last: bool

    def after(self, tokens: int) -> "ChunkSlice":
        """What is left of it without its first ``tokens``."""
        start, rest = self.start + tokens, self.tokens - tokens
        return ChunkSlice(self.owner, self.request, start, rest, self.block_table, self.is_last)


class RunChunk(msgspec.Struct, frozen=True, gc=False):
    """``report_every``: after so many layers each ``LayersComputed`` is wanted, as KV is handed over
    meanwhile; None: not at all."""

    slices: tuple[ChunkSlice, ...]
    report_every: int | None

    def of(self, slices: tuple[ChunkSlice, ...]) -> "RunChunk":
        """The same with those, of which some may be computed already."""
        return RunChunk(slices, self.report_every)


class PublishToken(msgspec.Struct, frozen=True, gc=False):
    gateway_id: GatewayId
    event: TokenEvent
    queue_s: float
    """How long the prompt waited before its first chunk."""
    compute_s: float


class OfferSequence(msgspec.Struct, frozen=True, gc=False):
    owner: BlockOwner
    decode_instance: InstanceId
    task: DecodeTask


class SeekDecode(msgspec.Struct, frozen=True, gc=False):
    """Find the sequence another decode instance than ``refused``, if it was, ``wanted`` if it can: its KV
    stays here until then. ``request.output_ids``: all that was drawn."""

    owner: BlockOwner
    request: GenerationRequest
    refused: InstanceId | None
    wanted: InstanceId | None = None


class PublishMove(msgspec.Struct, frozen=True, gc=False):
    """The gateway is to hear where the sequence goes on instead."""

    gateway_id: GatewayId
    moved: SequenceMoved


class KeepHere(msgspec.Struct, frozen=True, gc=False):
    """This instance is to decode the sequence: its decode room is to take the blocks from ``held_by``. The
    sequence is this room's no more."""

    held_by: BlockOwner
    task: DecodeTask


class WithdrawOffer(msgspec.Struct, frozen=True, gc=False):
    """The sequence has ended here: its decode instance need not wait for it."""

    owner: BlockOwner
    decode_instance: InstanceId


class HandOverBegun(msgspec.Struct, frozen=True, gc=False):
    """The first portion was asked for, ``queue_s`` after the prompt was computed; 0: while it was."""

    queue_s: float


class SendKV(msgspec.Struct, frozen=True, gc=False):
    """Write those parts of the sequence's KV from ``source_blocks`` into the puller's blocks."""

    owner: BlockOwner
    pull: PullKV
    source_blocks: tuple[int, ...]
    spans: tuple[KVSpan, ...]


class AnswerPull(msgspec.Struct, frozen=True, gc=False):
    """Nothing of the portion is in the air any more."""

    owner: BlockOwner
    portion: int
    answer: KVDelivered | ErrorReply


PrefillCommand = (
    RunChunk
    | PublishToken
    | PublishFailure
    | PublishMove
    | OfferSequence
    | SeekDecode
    | KeepHere
    | WithdrawOffer
    | HandOverBegun
    | SendKV
    | AnswerPull
)
