"""What can happen to the prefill room (events) and what it may ask for (commands). Values only."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class TaskArrived:
    task: PrefillTask


@dataclass(frozen=True, slots=True)
class SequenceLeft:
    """This instance's decode room has given a running sequence up: it is to go on at another instance.
    ``held_by``: who holds its blocks, which are this room's from now on. ``request.output_ids``: all that was
    drawn; the last has no KV yet."""

    held_by: BlockOwner
    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    lengths: LengthDistribution | None


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """The K and V of the chunk in flight, the oldest where there are several, stand in the pool, in its first
    ``layers`` layers."""

    layers: int


@dataclass(frozen=True, slots=True)
class ChunkAdvanced:
    """The chunk that began last has left the first stage of a pipeline: the next one may follow it."""


@dataclass(frozen=True, slots=True)
class ChunkFinished:
    """One entry per slice of the chunk in flight, the oldest where there are several; a token where the slice
    ended its prompt."""

    tokens: tuple[SampledToken | None, ...]


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """The oldest."""

    error: ErrorReply


@dataclass(frozen=True, slots=True)
class OfferRefused:
    """The decode instance did not take the sequence over. ``is_lost``: it did not even answer. ``is_early``:
    the offer was made before the first token was there."""

    owner: BlockOwner
    error: ErrorReply
    is_lost: bool = False
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class OfferDeclined:
    """A decode instance gives back what it was offered: ``wanted`` has more room."""

    owner: BlockOwner
    decode_instance: InstanceId
    wanted: InstanceId


@dataclass(frozen=True, slots=True)
class DecodeFound:
    """Another decode instance expects the sequence now."""

    owner: BlockOwner
    placement: Placement


@dataclass(frozen=True, slots=True)
class DecodeNotFound:
    """``error``: why no other decode instance takes the sequence."""

    owner: BlockOwner
    error: ErrorReply


@dataclass(frozen=True, slots=True)
class PullArrived:
    pull: PullKV


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Every byte of the portion in the air has arrived."""

    owner: BlockOwner
    kv_bytes: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The portion has not arrived; nothing of it is sent any more."""

    owner: BlockOwner
    error: ErrorReply


@dataclass(frozen=True, slots=True)
class CancelArrived:
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeInstanceGone:
    instance_id: InstanceId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class GatewayGone:
    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """By the instance's other room: who waits for memory here may go on."""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """``is_prefill``: prompts are admitted from now on; else only those that are here are finished."""

    is_prefill: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Now and then."""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Admit nothing more; finish what is here."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
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
    | TimePassed
    | RoleChanged
    | DrainStarted
    | DrainExpired
)


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """Compute ``tokens`` positions of a prompt from ``start``; draw a token when it ends there."""

    owner: BlockOwner
    request: GenerationRequest
    start: int
    tokens: int
    block_table: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class RunChunk:
    """``report_every``: after so many layers each ``LayersComputed`` is wanted, as KV is handed over
    meanwhile; None: not at all."""

    slices: tuple[ChunkSlice, ...]
    report_every: int | None


@dataclass(frozen=True, slots=True)
class PublishToken:
    gateway_id: GatewayId
    event: TokenEvent
    queue_s: float
    """How long the prompt waited before its first chunk."""
    compute_s: float


@dataclass(frozen=True, slots=True)
class OfferSequence:
    owner: BlockOwner
    decode_instance: InstanceId
    task: DecodeTask


@dataclass(frozen=True, slots=True)
class SeekDecode:
    """Find the sequence another decode instance than ``refused``, if it was, ``wanted`` if it can: its KV
    stays here until then. ``request.output_ids``: all that was drawn."""

    owner: BlockOwner
    request: GenerationRequest
    refused: InstanceId | None
    wanted: InstanceId | None = None


@dataclass(frozen=True, slots=True)
class PublishMove:
    """The gateway is to hear where the sequence goes on instead."""

    gateway_id: GatewayId
    moved: SequenceMoved


@dataclass(frozen=True, slots=True)
class KeepHere:
    """This instance is to decode the sequence: its decode room is to take the blocks from ``held_by``. The
    sequence is this room's no more."""

    held_by: BlockOwner
    task: DecodeTask


@dataclass(frozen=True, slots=True)
class WithdrawOffer:
    """The sequence has ended here: its decode instance need not wait for it."""

    owner: BlockOwner
    decode_instance: InstanceId


@dataclass(frozen=True, slots=True)
class HandOverBegun:
    """The first portion was asked for, ``queue_s`` after the prompt was computed; 0: while it was."""

    queue_s: float


@dataclass(frozen=True, slots=True)
class SendKV:
    """Write those parts of the sequence's KV from ``source_blocks`` into the puller's blocks."""

    owner: BlockOwner
    pull: PullKV
    source_blocks: tuple[int, ...]
    spans: tuple[KVSpan, ...]


@dataclass(frozen=True, slots=True)
class AnswerPull:
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
