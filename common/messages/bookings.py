"""What schedulers tell each other of the requests they have placed.

Every scheduler knows every booking, so none overbooks an instance that another has just filled. A booking has
a version, and the higher one wins wherever two meet: words may come twice, late or in any order.
"""

from typing import ClassVar

import msgspec

from common.ids import GatewayId, Incarnation, RequestId
from common.lengths import LengthDistribution
from common.messages.placement import Placement


class BookingVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Compared field by field. ``is_over``: the gateway has ended that attempt, which is the last word on it.
    ``revision`` counts the changes of one attempt; ``writer`` made this one."""

    attempt: int
    is_over: bool = False
    revision: int = 0
    writer: Incarnation = Incarnation("")

    NONE: ClassVar["BookingVersion"]


BookingVersion.NONE = BookingVersion(-1)


class BookedRequest(msgspec.Struct, frozen=True, array_like=True):
    """``deliverer``: the scheduler that hands the request over to its instance, and ``is_acknowledged`` once
    it has. ``predicted``: the predictor's word on the whole output, ``expected_tokens`` what it will still
    draw."""

    gateway_id: GatewayId
    placement: Placement
    prompt_tokens: int
    expected_tokens: int
    is_heavy: bool
    deliverer: Incarnation
    is_acknowledged: bool
    predicted: LengthDistribution | None = None


class Booking(msgspec.Struct, frozen=True, array_like=True):
    """``booked`` None: it is not any more."""

    request_id: RequestId
    version: BookingVersion
    booked: BookedRequest | None = None


class BookingsChanged(msgspec.Struct, frozen=True, tag="bookings"):
    """scheduler → schedulers, at each change and, with none, every heartbeat. ``changed``: how many changes
    there have been since it began, these included: who has heard of fewer has missed some.
    ``is_leaving``: it places no more."""

    scheduler_id: str
    incarnation: Incarnation
    changed: int
    bookings: tuple[Booking, ...] = ()
    is_leaving: bool = False


class ReadBookings(msgspec.Struct, frozen=True, tag="read-bookings"):
    """scheduler → scheduler: all that you know, in the order of requests' names, after that one. Answered by
    a BookingsPage."""

    after: RequestId | None = None


class BookingsPage(msgspec.Struct, frozen=True, tag="bookings-page"):
    incarnation: Incarnation
    bookings: tuple[Booking, ...]
    is_last: bool
