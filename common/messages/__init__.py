"""What the services say to each other.

Every message is a frozen, tagged msgspec Struct and travels as msgpack. A message is a value: no service
keeps a second class that mirrors it. Token ids, block ids and counts are plain integers; times are seconds
and are only ever compared within the process that measured them.

A request's walk, by message::

    gateway   --SubmitRequest-->  scheduler  --PrefillTask-->  prefill   (calls, acknowledged)
    prefill   --TokenBatch----->  gateway                                (publish, token 0)
    prefill   --DecodeTask----->  decode                                 (call, acknowledged; a long prompt's
                                                                          before its token 0)
    decode    --PullKV--------->  prefill                                (calls, a portion each, answered when
                                                                          its bytes arrived)
    decode    --TokenBatch----->  gateway                                (publish, one a step)
    gateway   --RequestEnded--->  scheduler, predictor                   (publish)
    gateway   --CancelRequest-->  instances                              (publish; also the scheduler's, for a
                                                                          task that was not acknowledged)

`lamella flip` changes an instance's role (``FlipRole``). What decodes there then leaves::

    decode    --PlaceMoved---->  scheduler                               (call, answered with its new home)
    decode    --SequenceMoved->  gateway                                 (publish)
    prefill room of the same instance  --DecodeTask-->  decode           (and on as above)

A computed prompt whose decode instance refuses it, as it is full or about to end, goes on so, too.
A mixed instance decodes the prompts that it computes: of these nothing is sent.
And so do sequences of an instance that is expected to run out of memory, where another has room::

    scheduler --LeaveSequence->  decode                                  (publish, by the leader)
    decode    --OfferDeclined->  prefill                                 (publish, of one that has not begun)

Where KV does not get from one instance to another, though both answer::

    decode    --KVLinkFailed-->  schedulers                              (publish; of what is slow, prefill)
    either    --KVLinkWorks--->  schedulers                              (publish, once something gets there)

Beside prefill, where there is a length predictor::

    scheduler --PredictLength-->  predictor                              (call, answered by PredictedLength)
    scheduler --LengthPredicted>  decode                                 (publish)

Where several schedulers run, each tells the others what it books (``common.messages.bookings``); what decode
instances and attention workers say to each other is in ``common.messages.attention``. These two conversations
are their own members' alone, and imported from there.

Reading order: requests, replies, roles, members; then a request's walk by placement, tasks, hand_over and
streams; lengths, load and work beside it; an operator's wishes (admin) and addressees at last.
"""

from common.messages.addressees import (
    GatewayEvent,
    InstanceCall,
    InstanceEvent,
    SchedulerCall,
    SchedulerEvent,
)
from common.messages.admin import DrainWish, ScaleWish, WishNews, WishState
from common.messages.attention import AttentionDraining
from common.messages.hand_over import (
    KVDelivered,
    KVDestination,
    KVLinkFailed,
    KVLinkWorks,
    LeaveSequence,
    OfferDeclined,
    OfferWithdrawn,
    PullKV,
)
from common.messages.lengths import LengthPredicted, PredictedLength, PredictLength
from common.messages.load import LoadReport, MovableSequence
from common.messages.members import (
    Announcement,
    AreYouThere,
    AttentionGone,
    GatewayGone,
    InstanceGone,
    InstanceLife,
    InstanceRecord,
    LeaderAnnounced,
    MemberRecord,
    SchedulerGone,
    ServiceKind,
    ServiceRecord,
)
from common.messages.placement import Placement, PlaceMoved, Queued, RequestEnded, SubmitAnswer, SubmitRequest
from common.messages.replies import Acknowledged, ErrorReply, as_request_error, error_reply
from common.messages.requests import FinishReason, GenerationRequest, SampledToken, SamplingParams
from common.messages.roles import ROLES_WITH, FlipProgress, FlipRole, Phase, Role, has_phase
from common.messages.streams import SequenceFailed, SequenceMoved, TokenBatch, TokenEvent
from common.messages.tasks import CancelRequest, DecodeTask, HostProcess, PrefillTask, ResumeTask
from common.messages.work import AttentionUse, LinkTraffic, Work, WorkDone, WorkerUse, WorkKind

__all__ = [
    "ROLES_WITH",
    "Acknowledged",
    "Announcement",
    "AreYouThere",
    "AttentionDraining",
    "AttentionGone",
    "AttentionUse",
    "CancelRequest",
    "DecodeTask",
    "DrainWish",
    "ErrorReply",
    "FinishReason",
    "FlipProgress",
    "FlipRole",
    "GatewayEvent",
    "GatewayGone",
    "GenerationRequest",
    "HostProcess",
    "InstanceCall",
    "InstanceEvent",
    "InstanceGone",
    "InstanceLife",
    "InstanceRecord",
    "KVDelivered",
    "KVDestination",
    "KVLinkFailed",
    "KVLinkWorks",
    "LeaderAnnounced",
    "LeaveSequence",
    "LengthPredicted",
    "LinkTraffic",
    "LoadReport",
    "MemberRecord",
    "MovableSequence",
    "OfferDeclined",
    "OfferWithdrawn",
    "Phase",
    "PlaceMoved",
    "Placement",
    "PredictLength",
    "PredictedLength",
    "PrefillTask",
    "PullKV",
    "Queued",
    "RequestEnded",
    "ResumeTask",
    "Role",
    "SampledToken",
    "SamplingParams",
    "ScaleWish",
    "SchedulerCall",
    "SchedulerEvent",
    "SchedulerGone",
    "SequenceFailed",
    "SequenceMoved",
    "ServiceKind",
    "ServiceRecord",
    "SubmitAnswer",
    "SubmitRequest",
    "TokenBatch",
    "TokenEvent",
    "WishNews",
    "WishState",
    "Work",
    "WorkDone",
    "WorkKind",
    "WorkerUse",
    "as_request_error",
    "error_reply",
    "has_phase",
]
