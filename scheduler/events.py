"""What happens to the scheduler, and what it then wants done."""

import msgspec

from common.errors import RequestError
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import (
    GenerationRequest,
    InstanceLife,
    KVLinkFailed,
    KVLinkWorks,
    LoadReport,
    MemberRecord,
    Placement,
)
from common.messages.bookings import Booking, BookingsChanged
from scheduler.policy.decode_rebalancing import Departure


class MembersRead(msgspec.Struct, frozen=True, gc=False):
    """What the store holds now."""

    records: tuple[MemberRecord, ...]


class DepartedRead(msgspec.Struct, frozen=True, gc=False):
    """Lives that the store knows to be over, of which no scheduler may have told anybody."""

    lives: tuple[InstanceLife, ...]


class LoadReported(msgspec.Struct, frozen=True, gc=False):
    report: LoadReport


class TaskAcknowledged(msgspec.Struct, frozen=True, gc=False):
    """The prefill instance, or where it is resumed the decode instance, took the request over."""

    request_id: RequestId
    attempt: int


class TaskUndelivered(msgspec.Struct, frozen=True, gc=False):
    """It did not take the request; that attempt's placement is void."""

    request_id: RequestId
    attempt: int


class InstanceSuspected(msgspec.Struct, frozen=True, gc=False):
    """Somebody got no answer from it. A live one is heard of again within a report's interval."""

    instance_id: InstanceId


class InstanceEnded(msgspec.Struct, frozen=True, gc=False):
    """Its process is no more (``scheduler.lifelines``)."""

    life: InstanceLife


class LinkHeard(msgspec.Struct, frozen=True, gc=False):
    """One of both says so; each answers."""

    word: KVLinkFailed | KVLinkWorks


class RequestOver(msgspec.Struct, frozen=True, gc=False):
    """As ``RequestEnded`` says."""

    request_id: RequestId
    prompt_tokens: int = 0
    output_tokens: int | None = None
    is_cut: bool = False
    attempt: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None


class LengthPredicted(msgspec.Struct, frozen=True, gc=False):
    """The predictor's word on a request that was placed meanwhile. ``lengths``: of its whole output."""

    request: GenerationRequest
    lengths: LengthDistribution


class PeerHeard(msgspec.Struct, frozen=True, gc=False):
    """Another scheduler, or oneself, tells what it has booked."""

    message: BookingsChanged


class PeerRead(msgspec.Struct, frozen=True, gc=False):
    """All that another scheduler knows; None: it did not answer."""

    incarnation: Incarnation
    bookings: tuple[Booking, ...] | None


class BookingsRead(msgspec.Struct, frozen=True, gc=False):
    """What the store has of all schedulers, also of those that are gone."""

    bookings: tuple[Booking, ...]


class MessagesLost(msgspec.Struct, frozen=True, gc=False):
    """To this scheduler, from anybody."""


class CallAnswered(msgspec.Struct, frozen=True, gc=False):
    """A request waits, and its gateway was told to ask again."""

    request_id: RequestId


class TimePassed(msgspec.Struct, frozen=True, gc=False):
    """Now and then: silence is noticed here."""


class BusRestored(msgspec.Struct, frozen=True, gc=False):
    """The bus was away, so everybody's silence until now says nothing about them."""


class RebalanceDue(msgspec.Struct, frozen=True, gc=False):
    """This scheduler leads: it may ask sequences to leave one decode instance for another."""


SchedulerStateEvent = (
    MembersRead
    | DepartedRead
    | LoadReported
    | TaskAcknowledged
    | TaskUndelivered
    | InstanceSuspected
    | InstanceEnded
    | LinkHeard
    | RequestOver
    | LengthPredicted
    | PeerHeard
    | PeerRead
    | BookingsRead
    | MessagesLost
    | CallAnswered
    | TimePassed
    | RebalanceDue
    | BusRestored
)


class ReadMembers(msgspec.Struct, frozen=True, gc=False):
    """Somebody unknown speaks: read the store now."""


class AnnounceInstanceGone(msgspec.Struct, frozen=True, gc=False):
    """``was_leaving``: it said so, and was heard no more. ``is_former``: another life of it is known by now,
    or none, and whoever tells has not seen this one end."""

    instance_id: InstanceId
    incarnation: Incarnation
    was_leaving: bool = False
    is_former: bool = False


class AnnounceAttentionGone(msgspec.Struct, frozen=True, gc=False):
    worker_id: str
    incarnation: Incarnation
    was_leaving: bool


class AnnounceGatewayGone(msgspec.Struct, frozen=True, gc=False):
    gateway_id: GatewayId


class AnnounceSchedulerGone(msgspec.Struct, frozen=True, gc=False):
    """Submissions that it may have had are to be made again."""

    scheduler_id: str
    incarnation: Incarnation


class ReadPeer(msgspec.Struct, frozen=True, gc=False):
    """Ask it for everything it knows; answered by PeerRead."""

    scheduler_id: str
    incarnation: Incarnation


class TellLength(msgspec.Struct, frozen=True, gc=False):
    """To the decode instance of that attempt. ``lengths``: of its whole output."""

    decode_instance: InstanceId
    request_id: RequestId
    attempt: int
    lengths: LengthDistribution


class AskToLeave(msgspec.Struct, frozen=True, gc=False):
    """Of a decode instance: let the sequence go on at another."""

    departure: Departure


class EndWait(msgspec.Struct, frozen=True, gc=False):
    """Answer the call that is held for a request that waited: it is booked, or refused."""

    request_id: RequestId
    attempt: int
    outcome: Placement | RequestError


SchedulerCommand = (
    ReadMembers
    | AnnounceInstanceGone
    | AnnounceGatewayGone
    | AnnounceSchedulerGone
    | ReadPeer
    | TellLength
    | AskToLeave
    | EndWait
)
