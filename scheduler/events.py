"""What happens to the scheduler, and what it then wants done."""

from dataclasses import dataclass

from common.errors import RequestError
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import GenerationRequest, InstanceLife, LoadReport, MemberRecord, Placement
from common.messages.bookings import Booking, BookingsChanged
from scheduler.policy.decode_rebalancing import Departure


@dataclass(frozen=True, slots=True)
class MembersRead:
    """What the store holds now."""

    records: tuple[MemberRecord, ...]


@dataclass(frozen=True, slots=True)
class DepartedRead:
    """Lives that the store knows to be over, of which no scheduler may have told anybody."""

    lives: tuple[InstanceLife, ...]


@dataclass(frozen=True, slots=True)
class LoadReported:
    report: LoadReport


@dataclass(frozen=True, slots=True)
class TaskAcknowledged:
    """The prefill instance, or where it is resumed the decode instance, took the request over."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskUndelivered:
    """It did not take the request; that attempt's placement is void."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """Somebody got no answer from it. A live one is heard of again within a report's interval."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class RequestOver:
    """As ``RequestEnded`` says."""

    request_id: RequestId
    prompt_tokens: int = 0
    output_tokens: int | None = None
    is_cut: bool = False
    attempt: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class LengthPredicted:
    """The predictor's word on a request that was placed meanwhile. ``lengths``: of its whole output."""

    request: GenerationRequest
    lengths: LengthDistribution


@dataclass(frozen=True, slots=True)
class PeerHeard:
    """Another scheduler, or oneself, tells what it has booked."""

    message: BookingsChanged


@dataclass(frozen=True, slots=True)
class PeerRead:
    """All that another scheduler knows; None: it did not answer."""

    incarnation: Incarnation
    bookings: tuple[Booking, ...] | None


@dataclass(frozen=True, slots=True)
class BookingsRead:
    """What the store has of all schedulers, also of those that are gone."""

    bookings: tuple[Booking, ...]


@dataclass(frozen=True, slots=True)
class MessagesLost:
    """To this scheduler, from anybody."""


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """A request waits, and its gateway was told to ask again."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Now and then: silence is noticed here."""


@dataclass(frozen=True, slots=True)
class BusRestored:
    """The bus was away, so everybody's silence until now says nothing about them."""


@dataclass(frozen=True, slots=True)
class RebalanceDue:
    """This scheduler leads: it may ask sequences to leave one decode instance for another."""


SchedulerStateEvent = (
    MembersRead
    | DepartedRead
    | LoadReported
    | TaskAcknowledged
    | TaskUndelivered
    | InstanceSuspected
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


@dataclass(frozen=True, slots=True)
class ReadMembers:
    """Somebody unknown speaks: read the store now."""


@dataclass(frozen=True, slots=True)
class AnnounceInstanceGone:
    """``was_leaving``: it said so, and was heard no more."""

    instance_id: InstanceId
    incarnation: Incarnation
    was_leaving: bool = False


@dataclass(frozen=True, slots=True)
class AnnounceGatewayGone:
    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class AnnounceSchedulerGone:
    """Submissions that it may have had are to be made again."""

    scheduler_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class ReadPeer:
    """Ask it for everything it knows; answered by PeerRead."""

    scheduler_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class TellLength:
    """To the decode instance of that attempt. ``lengths``: of its whole output."""

    decode_instance: InstanceId
    request_id: RequestId
    attempt: int
    lengths: LengthDistribution


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Of a decode instance: let the sequence go on at another."""

    departure: Departure


@dataclass(frozen=True, slots=True)
class EndWait:
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
