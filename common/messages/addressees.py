"""What each addressee takes in, as one type: what is called, and what is published to it."""

from common.messages.attention import AttentionDraining
from common.messages.hand_over import (
    KVLinkFailed,
    KVLinkWorks,
    LeaveSequence,
    OfferDeclined,
    OfferWithdrawn,
    PullKV,
)
from common.messages.lengths import LengthPredicted
from common.messages.load import LoadReport
from common.messages.members import Announcement, AreYouThere
from common.messages.placement import PlaceMoved, RequestEnded, SubmitRequest
from common.messages.roles import FlipRole
from common.messages.streams import SequenceFailed, SequenceMoved, TokenBatch
from common.messages.tasks import CancelRequest, DecodeTask, PrefillTask, ResumeTask
from common.messages.work import WorkDone

InstanceCall = PrefillTask | DecodeTask | ResumeTask | PullKV | FlipRole | AreYouThere
InstanceEvent = (
    CancelRequest
    | OfferWithdrawn
    | OfferDeclined
    | LeaveSequence
    | LengthPredicted
    | Announcement
    | AttentionDraining
)
SchedulerCall = SubmitRequest | PlaceMoved
SchedulerEvent = RequestEnded | LoadReport | KVLinkFailed | KVLinkWorks
GatewayEvent = TokenBatch | SequenceFailed | SequenceMoved | WorkDone
