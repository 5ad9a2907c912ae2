"""What can happen to the decode room (events) and what it may ask for (commands). Values only."""

import msgspec

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


class TaskArrived(msgspec.Struct, frozen=True, gc=False):
    task: DecodeTask


class SequenceStayed(msgspec.Struct, frozen=True, gc=False):
    """This instance's prefill room has computed the prompt of a sequence that is to be decoded here.
    ``held_by``: who holds its blocks, which are this room's from now on."""

    held_by: BlockOwner
    task: DecodeTask


class ResumeArrived(msgspec.Struct, frozen=True, gc=False):
    """The workers of that pool keep the sequence's KV, from another life's pool."""

    task: ResumeTask
    pool: int


class LengthPredicted(msgspec.Struct, frozen=True, gc=False):
    """How much a sequence will have drawn in the end. It may not be here yet."""

    owner: BlockOwner
    lengths: LengthDistribution


class PortionPulled(msgspec.Struct, frozen=True, gc=False):
    """The portion asked for is in the sequence's blocks; more is to come."""

    owner: BlockOwner
    kv_bytes: int
    transfer_s: float


class PullFinished(msgspec.Struct, frozen=True, gc=False):
    """Every byte of the sequence's KV is in its blocks; ``kv_bytes`` came last. ``first_token``: prefill's,
    which a sequence needs that was offered without."""

    owner: BlockOwner
    first_token: int | None = None
    kv_bytes: int = 0
    transfer_s: float = 0.0


class PullFailed(msgspec.Struct, frozen=True, gc=False):
    """The KV did not come. ``is_drained``: no byte of the transfer can still land in the blocks.
    ``lost_instance``: the prefill instance, where it does not answer."""

    owner: BlockOwner
    error: ErrorReply
    is_drained: bool
    lost_instance: InstanceId | None = None


class SequenceEnded(msgspec.Struct, frozen=True, gc=False):
    """The prefill instance has ended the sequence that it is asked for, and its gateway knows; nothing is in
    the air."""

    owner: BlockOwner


class OfferWithdrawn(msgspec.Struct, frozen=True, gc=False):
    """The prefill instance has ended a sequence that it had offered, and its gateway knows."""

    owner: BlockOwner
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation


class PrefillGone(msgspec.Struct, frozen=True, gc=False):
    """That life of a prefill instance is over: no KV comes from it any more. PullFailed or the rest is still
    due for what it was asked for."""

    prefill_instance: InstanceId
    prefill_incarnation: Incarnation


class PullDrained(msgspec.Struct, frozen=True, gc=False):
    """A transfer given up on earlier can no longer write: its quarantined blocks are safe again."""

    owner: BlockOwner


class MoveFinished(msgspec.Struct, frozen=True, gc=False):
    """The sequence's KV is in the other pool, too."""

    owner: BlockOwner


class MoveFailed(msgspec.Struct, frozen=True, gc=False):
    """It is not, and what was sent may still land there."""

    owner: BlockOwner


class MoveDrained(msgspec.Struct, frozen=True, gc=False):
    """Nothing of a move that failed can land any more."""

    owner: BlockOwner


class SwapFinished(msgspec.Struct, frozen=True, gc=False):
    """The sequence's KV is where SwapOut or SwapIn wanted it, after ``copy_s`` of copying."""

    owner: BlockOwner
    kv_bytes: int
    copy_s: float


class SwapFailed(msgspec.Struct, frozen=True, gc=False):
    """It is not, and nothing is being copied any more."""

    owner: BlockOwner


class StepFinished(msgspec.Struct, frozen=True, gc=False):
    """The tokens of the step in flight, in the order of its rows; None where the row's KV was lost."""

    tokens: tuple[SampledToken | None, ...]
    lane: int = 0


class StepsFinished(msgspec.Struct, frozen=True, gc=False):
    """So many ``steps`` of the same rows one after another, as an engine that is modelled computes them
    (``services.simulator``): at most ``DecodeState.steps_ahead``. All but the last drew ``before`` for every
    row, which ends none. The last one's ``tokens`` are as in StepFinished, and gateways are told of those
    alone that end a sequence. Nothing else tells this from single steps of equal length."""

    steps: int
    tokens: tuple[SampledToken, ...]
    before: SampledToken
    lane: int = 0


class StepFailed(msgspec.Struct, frozen=True, gc=False):
    """``can_continue``: the sequences are sound, only their KV is lost."""

    error: ErrorReply
    can_continue: bool = False
    lane: int = 0


class PoolAdded(msgspec.Struct, frozen=True, gc=False):
    """Attention workers were bound. Pools are numbered as they come."""

    total_blocks: int


class PoolClosed(msgspec.Struct, frozen=True, gc=False):
    """The pool's attention worker drains: nobody new goes there."""

    pool: int


class PoolLost(msgspec.Struct, frozen=True, gc=False):
    """The pool's attention worker is gone, and the KV with it."""

    pool: int


class PoolLeft(msgspec.Struct, frozen=True, gc=False):
    """A closed pool in which nobody is left is given up."""

    pool: int


class CancelArrived(msgspec.Struct, frozen=True, gc=False):
    request_id: RequestId
    attempt: int


class GatewayGone(msgspec.Struct, frozen=True, gc=False):
    gateway_id: GatewayId


class BlocksFreed(msgspec.Struct, frozen=True, gc=False):
    """By the instance's other room: who waits for memory here may go on."""


class PassDue(msgspec.Struct, frozen=True, gc=False):
    """The engine asks for the next step: its turn has come (``RoomMates.step_due_s``)."""


class RoleChanged(msgspec.Struct, frozen=True, gc=False):
    """``is_decode``: sequences are placed here from now on; else none is any more, and those that run leave.
    Those that were placed here before still come: their prompts are computed elsewhere, and would have to be
    computed again."""

    is_decode: bool


class LeaveAsked(msgspec.Struct, frozen=True, gc=False):
    """The sequence had better go on at ``wanted``: here memory is expected to run out."""

    owner: BlockOwner
    wanted: InstanceId


class HomeFound(msgspec.Struct, frozen=True, gc=False):
    """Another instance expects the sequence: it can leave. Or this one is to keep it."""

    owner: BlockOwner
    home: Placement


class SearchEnded(msgspec.Struct, frozen=True, gc=False):
    """No home is sought for the sequence any more."""

    owner: BlockOwner


class DrainStarted(msgspec.Struct, frozen=True, gc=False):
    """Admit nothing more. Waiting sequences go back to be placed elsewhere; running ones finish."""


class DrainExpired(msgspec.Struct, frozen=True, gc=False):
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
    | PassDue
    | RoleChanged
    | LeaveAsked
    | HomeFound
    | SearchEnded
    | DrainStarted
    | DrainExpired
)


class PullSequence(msgspec.Struct, frozen=True, gc=False):
    """Ask the prefill instance to write the next portion of the sequence's KV into these blocks.
    ``sender``: who is going to do so."""

    owner: BlockOwner
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation
    blocks: tuple[int, ...]
    portion: int
    max_bytes: int | None
    sender: HostProcess | None = None


class InheritSequence(msgspec.Struct, frozen=True, gc=False):
    """Have the workers of the blocks' pool copy the KV of the sequence's first ``tokens`` tokens, which they
    keep of ``former``, into these blocks."""

    owner: BlockOwner
    former: InstanceLife
    tokens: int
    blocks: tuple[int, ...]


class MoveSequence(msgspec.Struct, frozen=True, gc=False):
    """Have the workers of the blocks' pool write the KV of the sequence's first ``tokens`` tokens into
    ``destination_blocks`` of another pool. It is in no step until MoveFinished or MoveFailed says so."""

    owner: BlockOwner
    tokens: int
    blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]


class SwapOut(msgspec.Struct, frozen=True, gc=False):
    """Copy what is in ``blocks`` into the host tier's ``host_blocks``. SwapFinished or SwapFailed is due."""

    owner: BlockOwner
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class SwapIn(msgspec.Struct, frozen=True, gc=False):
    """Copy what is in the host tier's ``host_blocks`` into ``blocks``. As SwapOut."""

    owner: BlockOwner
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class SeekHome(msgspec.Struct, frozen=True, gc=False):
    """Ask who can take this sequence, until HomeFound or, where it is to leave no more, SearchEnded.
    ``wanted``: who should, if it can; then one question is enough."""

    owner: BlockOwner
    request: GenerationRequest
    wanted: InstanceId | None = None


class DeclineOffer(msgspec.Struct, frozen=True, gc=False):
    """A sequence that has not begun here is given back to its prefill instance, for ``wanted`` to take."""

    owner: BlockOwner
    prefill_instance: InstanceId
    wanted: InstanceId


class HandOn(msgspec.Struct, frozen=True, gc=False):
    """The sequence is this room's no more: the prefill room is to take its blocks from ``held_by`` and hand
    it over to the ``home``'s decode instance. ``request.output_ids``: all that was drawn."""

    owner: BlockOwner
    held_by: BlockOwner
    request: GenerationRequest
    home: Placement
    lengths: LengthDistribution | None


class StepRow(msgspec.Struct, frozen=True, gc=False):
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


class RunStep(msgspec.Struct, frozen=True, gc=False):
    """``lane``: which of the batches that take turns."""

    rows: tuple[StepRow, ...]
    lane: int = 0


class PublishTokens(msgspec.Struct, frozen=True, gc=False):
    gateway_id: GatewayId
    events: tuple[TokenEvent, ...]


class ObserveAdmission(msgspec.Struct, frozen=True, gc=False):
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
