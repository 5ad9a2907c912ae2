"""What can happen to the decode room (events) and what it may ask for (commands). Values only."""

from dataclasses import dataclass

from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockOwner
from common.lengths import LengthDistribution
from common.messages import (
    DecodeTask,
    ErrorReply,
    GenerationRequest,
    HostProcess,
    InstanceLife,
    Placement,
    ResumeTask,
    SampledToken,
    TokenEvent,
)
from common.sequences import PublishFailure


@dataclass(frozen=True, slots=True)
class TaskArrived:
    task: DecodeTask


@dataclass(frozen=True, slots=True)
class SequenceStayed:
    """This instance's prefill room has computed the prompt of a sequence that is to be decoded here.
    ``held_by``: who holds its blocks, which are this room's from now on."""

    held_by: BlockOwner
    task: DecodeTask


@dataclass(frozen=True, slots=True)
class ResumeArrived:
    """The workers of that pool keep the sequence's KV, from another life's pool."""

    task: ResumeTask
    pool: int


@dataclass(frozen=True, slots=True)
class LengthPredicted:
    """How much a sequence will have drawn in the end. It may not be here yet."""

    owner: BlockOwner
    lengths: LengthDistribution


@dataclass(frozen=True, slots=True)
class PortionPulled:
    """The portion asked for is in the sequence's blocks; more is to come."""

    owner: BlockOwner
    kv_bytes: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class PullFinished:
    """Every byte of the sequence's KV is in its blocks; ``kv_bytes`` came last. ``first_token``: prefill's,
    which a sequence needs that was offered without."""

    owner: BlockOwner
    first_token: int | None = None
    kv_bytes: int = 0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The KV did not come. ``is_drained``: no byte of the transfer can still land in the blocks.
    ``lost_instance``: the prefill instance, where it does not answer."""

    owner: BlockOwner
    error: ErrorReply
    is_drained: bool
    lost_instance: InstanceId | None = None


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The prefill instance has ended the sequence that it is asked for, and its gateway knows; nothing is in
    the air."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class OfferWithdrawn:
    """The prefill instance has ended a sequence that it had offered, and its gateway knows."""

    owner: BlockOwner
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PrefillGone:
    """That life of a prefill instance is over: no KV comes from it any more. PullFailed or the rest is still
    due for what it was asked for."""

    prefill_instance: InstanceId
    prefill_incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PullDrained:
    """A transfer given up on earlier can no longer write: its quarantined blocks are safe again."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class MoveFinished:
    """The sequence's KV is in the other pool, too."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """It is not, and what was sent may still land there."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class MoveDrained:
    """Nothing of a move that failed can land any more."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class SwapFinished:
    """The sequence's KV is where SwapOut or SwapIn wanted it, after ``copy_s`` of copying."""

    owner: BlockOwner
    kv_bytes: int
    copy_s: float


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """It is not, and nothing is being copied any more."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The tokens of the step in flight, in the order of its rows; None where the row's KV was lost."""

    tokens: tuple[SampledToken | None, ...]
    lane: int = 0


@dataclass(frozen=True, slots=True)
class StepsFinished:
    """So many ``steps`` of the same rows one after another, as an engine that is modelled computes them
    (``services.simulator``): at most ``DecodeState.steps_ahead``. All but the last drew ``before`` for every
    row, which ends none. The last one's ``tokens`` are as in StepFinished, and gateways are told of those
    alone that end a sequence. Nothing else tells this from single steps of equal length."""

    steps: int
    tokens: tuple[SampledToken, ...]
    before: SampledToken
    lane: int = 0


@dataclass(frozen=True, slots=True)
class StepFailed:
    """``can_continue``: the sequences are sound, only their KV is lost."""

    error: ErrorReply
    can_continue: bool = False
    lane: int = 0


@dataclass(frozen=True, slots=True)
class PoolAdded:
    """Attention workers were bound. Pools are numbered as they come."""

    total_blocks: int


@dataclass(frozen=True, slots=True)
class PoolClosed:
    """The pool's attention worker drains: nobody new goes there."""

    pool: int


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The pool's attention worker is gone, and the KV with it."""

    pool: int


@dataclass(frozen=True, slots=True)
class PoolLeft:
    """A closed pool in which nobody is left is given up."""

    pool: int


@dataclass(frozen=True, slots=True)
class CancelArrived:
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class GatewayGone:
    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """By the instance's other room: who waits for memory here may go on."""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """``is_decode``: sequences are placed here from now on; else none is any more, and those that run leave.
    Those that were placed here before still come: their prompts are computed elsewhere, and would have to be
    computed again."""

    is_decode: bool


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The sequence had better go on at ``wanted``: here memory is expected to run out."""

    owner: BlockOwner
    wanted: InstanceId


@dataclass(frozen=True, slots=True)
class HomeFound:
    """Another instance expects the sequence: it can leave. Or this one is to keep it."""

    owner: BlockOwner
    home: Placement


@dataclass(frozen=True, slots=True)
class SearchEnded:
    """No home is sought for the sequence any more."""

    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Admit nothing more. Waiting sequences go back to be placed elsewhere; running ones finish."""


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """The time to finish is over: everything goes back."""


DecodeEvent = (
    TaskArrived
    | SequenceStayed
    | ResumeArrived
    | LengthPredicted
    | PortionPulled
    | PullFinished
    | PullFailed
    | SequenceEnded
    | OfferWithdrawn
    | PrefillGone
    | PullDrained
    | MoveFinished
    | MoveFailed
    | MoveDrained
    | SwapFinished
    | SwapFailed
    | StepFinished
    | StepsFinished
    | StepFailed
    | PoolAdded
    | PoolClosed
    | PoolLost
    | PoolLeft
    | CancelArrived
    | GatewayGone
    | BlocksFreed
    | RoleChanged
    | LeaveAsked
    | HomeFound
    | SearchEnded
    | DrainStarted
    | DrainExpired
)


@dataclass(frozen=True, slots=True)
class PullSequence:
    """Ask the prefill instance to write the next portion of the sequence's KV into these blocks.
    ``sender``: who is going to do so."""

    owner: BlockOwner
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation
    blocks: tuple[int, ...]
    portion: int
    max_bytes: int
    sender: HostProcess | None = None


@dataclass(frozen=True, slots=True)
class InheritSequence:
    """Have the workers of the blocks' pool copy the KV of the sequence's first ``tokens`` tokens, which they
    keep of ``former``, into these blocks."""

    owner: BlockOwner
    former: InstanceLife
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoveSequence:
    """Have the workers of the blocks' pool write the KV of the sequence's first ``tokens`` tokens into
    ``destination_blocks`` of another pool. It is in no step until MoveFinished or MoveFailed says so."""

    owner: BlockOwner
    tokens: int
    blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy what is in ``blocks`` into the host tier's ``host_blocks``. SwapFinished or SwapFailed is due."""

    owner: BlockOwner
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy what is in the host tier's ``host_blocks`` into ``blocks``. As SwapOut."""

    owner: BlockOwner
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeekHome:
    """Ask who can take this sequence, until HomeFound or, where it is to leave no more, SearchEnded.
    ``wanted``: who should, if it can; then one question is enough."""

    owner: BlockOwner
    request: GenerationRequest
    wanted: InstanceId | None = None


@dataclass(frozen=True, slots=True)
class DeclineOffer:
    """A sequence that has not begun here is given back to its prefill instance, for ``wanted`` to take."""

    owner: BlockOwner
    prefill_instance: InstanceId
    wanted: InstanceId


@dataclass(frozen=True, slots=True)
class HandOn:
    """The sequence is this room's no more: the prefill room is to take its blocks from ``held_by`` and hand
    it over to the ``home``'s decode instance. ``request.output_ids``: all that was drawn."""

    owner: BlockOwner
    held_by: BlockOwner
    request: GenerationRequest
    home: Placement
    lengths: LengthDistribution | None


@dataclass(frozen=True, slots=True)
class StepRow:
    """Feed the sequence's last token at ``position`` and draw the next one. The lists are live, and the
    position with them: read them in the step, before its end is told."""

    owner: BlockOwner
    request: GenerationRequest
    output_ids: list[int]
    block_table: list[int]
    prompt_tokens: int
    max_tokens: int

    @property
    def position(self) -> int:
        return self.prompt_tokens + len(self.output_ids) - 1


@dataclass(frozen=True, slots=True)
class RunStep:
    """``lane``: which of the batches that take turns."""

    rows: tuple[StepRow, ...]
    lane: int = 0


@dataclass(frozen=True, slots=True)
class PublishTokens:
    gateway_id: GatewayId
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class ObserveAdmission:
    """A sequence entered the batch ``queue_s`` after it was offered."""

    queue_s: float


DecodeCommand = (
    PullSequence
    | InheritSequence
    | MoveSequence
    | SwapOut
    | SwapIn
    | SeekHome
    | DeclineOffer
    | HandOn
    | RunStep
    | PublishTokens
    | PublishFailure
    | ObserveAdmission
)
