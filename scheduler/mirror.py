"""Keeps this scheduler's bookings in the store too, and reads there what schedulers that are gone had booked.

Schedulers tell each other every booking (``scheduler.sharing``), so that a placement waits for nobody. Where
none is left to ask, whoever begins anew finds them in the store, at most a heartbeat old. What it reads is
merged by version, as any scheduler's word is; a booking whose end nobody heard meanwhile is found by the
number of requests that instances report (``scheduler.overdue``).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import StoreError
from common.ids import RequestId
from common.messages.bookings import BookingVersion
from common.store import Store
from scheduler import events
from scheduler.bookings import Bookings

log = logging.getLogger("lamella.scheduler")


@dataclass(slots=True)
class Mirror:
    """``handle`` takes an event into the state. ``written``: what the store has of this scheduler, which are
    the bookings that it changed last; None: not known."""

    store: Store
    bookings: Bookings
    heartbeat_s: float
    handle: Callable[[events.SchedulerStateEvent], None]
    written: dict[RequestId, BookingVersion] | None = None

    async def read(self) -> None:
        """Nothing where the store does not answer."""
        try:
            bookings = await self.store.bookings()
        except StoreError as exc:
            log.warning("bookings_unread", extra={"scheduler": "store", "error": str(exc)})
            return
        log.info("bookings_read", extra={"scheduler": "store", "bookings": len(bookings)})
        self.handle(events.BookingsRead(tuple(bookings)))

    async def keep(self) -> None:
        """Writes what has changed, every heartbeat. Runs until cancelled."""
        while True:
            await self.write()
            await asyncio.sleep(self.heartbeat_s)

    async def write(self) -> None:
        """All that is booked here, where the store has lost what it had, or may have: then the next time."""
        own, before = self.bookings.own(), self.written
        known = before or {}
        changed = [each for each, version in own.items() if known.get(each) != version]
        try:
            was_there = await self.store.write_bookings(
                self.bookings.incarnation,
                self.bookings.named(changed),
                known.keys() - own.keys(),
                is_whole=before is None,
            )
        except StoreError as exc:
            self.written = None
            log.warning("bookings_unwritten", extra={"error": str(exc)})
            return
        self.written = None if known and not was_there else own
