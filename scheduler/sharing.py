"""Tells the other schedulers what is booked here, and hears from them what they have booked."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from common.bus import Bus
from common.errors import BusError, NoResponder, RequestError
from common.ids import Incarnation, RequestId
from common.messages import MemberRecord, ServiceRecord
from common.messages.bookings import Booking, BookingsChanged, BookingsPage, ReadBookings
from common.subjects import Subjects
from scheduler import events
from scheduler.state import SchedulerState

log = logging.getLogger("lamella.scheduler")

PAGE_BOOKINGS = 1000
"""At about 200 bytes each, a fraction of the largest message; a predicted distribution may be kilobytes."""
PAGE_SHARE = 0.5
"""Of the largest message, for a page."""

Handle = Callable[[events.SchedulerStateEvent], None]


@dataclass(slots=True)
class Sharing:
    """``handle`` takes an event into the state and carries out what it says."""

    scheduler_id: str
    state: SchedulerState
    bus: Bus
    subjects: Subjects
    call_timeout_s: float
    handle: Handle
    has_left: bool = False

    async def start(self, members: Iterable[MemberRecord]) -> None:
        """Returns when it hears the others, and knows what those of ``members`` know that answer."""
        await self.bus.subscribe(self.subjects.scheduler_bookings(), BookingsChanged, self._hear)
        await self.bus.serve(self.subjects.scheduler_calls(self.scheduler_id), ReadBookings, self._answer)
        self.bus.on_loss.append(lambda: self.handle(events.MessagesLost()))
        self.bus.on_reconnect.append(lambda: self.handle(events.MessagesLost()))
        others = [
            (each.service_id, each.incarnation)
            for each in members
            if isinstance(each, ServiceRecord)
            and each.kind == "scheduler"
            and each.service_id != self.scheduler_id
        ]
        await asyncio.gather(*(self.read(*each) for each in others))

    def tell(self) -> None:
        """Of what has changed since the last time, if there is anything, and anybody to hear it."""
        bookings = self.state.bookings.take_changes()
        if bookings:
            self._publish(bookings)

    def beat(self) -> None:
        """Every heartbeat: who missed a change hears of it, and that this scheduler lives."""
        self._publish(self.state.bookings.take_changes())

    def leave(self) -> None:
        """What it still delivers it tells as who has left: nobody is to miss it then."""
        self.has_left = True
        self.beat()

    async def read(self, scheduler_id: str, incarnation: Incarnation) -> None:
        """Everything that one knows. One that does not answer is asked again when it is next heard."""
        try:
            bookings = await self._read_pages(scheduler_id, incarnation)
        except NoResponder:
            # It is gone, though its lease runs still.
            self.handle(events.PeerRead(incarnation, None))
        except (BusError, RequestError) as exc:
            log.warning("bookings_unread", extra={"scheduler": scheduler_id, "error": str(exc)})
            self.handle(events.PeerRead(incarnation, None))
        else:
            log.info("bookings_read", extra={"scheduler": scheduler_id, "bookings": len(bookings)})
            self.handle(events.PeerRead(incarnation, tuple(bookings)))

    async def _read_pages(self, scheduler_id: str, incarnation: Incarnation) -> list[Booking]:
        bookings: list[Booking] = []
        after: RequestId | None = None
        subject = self.subjects.scheduler_calls(scheduler_id)
        while True:
            page = await self.bus.call(subject, ReadBookings(after), BookingsPage, self.call_timeout_s)
            if page.incarnation != incarnation:
                raise NoResponder(f"{scheduler_id} has begun anew")
            bookings += page.bookings
            if page.is_last or not page.bookings:
                return bookings
            after = page.bookings[-1].request_id

    async def _answer(self, question: ReadBookings) -> BookingsPage:
        most = PAGE_BOOKINGS
        while True:
            bookings, is_last = self.state.bookings.read(question.after, most)
            page = BookingsPage(self.state.incarnation, bookings, is_last)
            size = len(msgspec.msgpack.encode(page))
            if len(bookings) <= 1 or size <= PAGE_SHARE * self.bus.max_message_bytes:
                return page
            most = len(bookings) // 2

    def _hear(self, message: BookingsChanged) -> None:
        if message.incarnation != self.state.incarnation:
            self.handle(events.PeerHeard(message))

    def _publish(self, bookings: tuple[Booking, ...]) -> None:
        changed = self.state.bookings.changed
        message = BookingsChanged(self.scheduler_id, self.state.incarnation, changed, bookings, self.has_left)
        try:
            self.bus.publish(self.subjects.scheduler_bookings(), message)
        except BusError as exc:
            # The others see by the next count that they have missed it.
            log.warning("bookings_untold", extra={"error": str(exc)})
