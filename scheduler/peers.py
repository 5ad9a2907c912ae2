"""The other schedulers: what each has told, whether any of it was missed, and when one is gone.

A peer counts its changes; who has heard of fewer asks it for everything it knows (``ReadPeer``). So does who
begins, or has lost messages. What a peer does not know any more of its own bookings is over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.ids import Incarnation, RequestId
from common.messages.bookings import Booking, BookingsChanged, BookingVersion
from scheduler.bookings import Bookings
from scheduler.events import AnnounceSchedulerGone, ReadPeer, SchedulerCommand


@dataclass(slots=True)
class Peer:
    """``changed``: as many of its changes are known. ``held``: the bookings that it had written, as they were
    known when it was asked for everything; None: it is not being asked."""

    scheduler_id: str
    heard_s: float
    changed: int
    is_behind: bool = True
    held: dict[RequestId, BookingVersion] | None = None


@dataclass(slots=True)
class Peers:
    """``strangers``: since when there are deliveries under way of schedulers that were never heard."""

    lease_s: float
    bookings: Bookings
    known: dict[Incarnation, Peer] = field(default_factory=dict)
    strangers: dict[Incarnation, float] = field(default_factory=dict)

    def hear(self, message: BookingsChanged, now: float) -> list[SchedulerCommand]:
        incarnation = message.incarnation
        if incarnation == self.bookings.incarnation:
            return []
        for booking in message.bookings:
            self.bookings.merge(booking, now)
        if message.is_leaving:
            self._forget(incarnation, now)
            return []
        peer = self.known.get(incarnation)
        if peer is None:
            peer = self.known[incarnation] = Peer(message.scheduler_id, now, message.changed)
            self.bookings.is_heard = True
        elif message.changed - len(message.bookings) > peer.changed:
            peer.is_behind = True
        peer.heard_s = now
        peer.changed = max(peer.changed, message.changed)
        return self._ask(incarnation, peer)

    def take_all(self, incarnation: Incarnation, bookings: Iterable[Booking] | None, now: float) -> None:
        """All that a peer knows; None: it did not answer, and is asked again when it is next heard."""
        peer = self.known.get(incarnation)
        told = set()
        for booking in bookings or ():
            told.add(booking.request_id)
            self.bookings.merge(booking, now)
        if peer is None or peer.held is None:
            return
        held, peer.held = peer.held, None
        if bookings is None:
            peer.is_behind = True
            return
        for request_id, version in held.items():
            if request_id not in told and self.bookings.version_of(request_id) == version:
                self.bookings.drop(request_id)

    def ask_all(self) -> list[SchedulerCommand]:
        """Messages to here were lost, whosever they were."""
        commands: list[SchedulerCommand] = []
        for incarnation, peer in self.known.items():
            peer.is_behind = True
            commands += self._ask(incarnation, peer)
        return commands

    def notice_silence(self, now: float) -> list[SchedulerCommand]:
        silent = [each for each, peer in self.known.items() if now - peer.heard_s > self.lease_s]
        silent += self._silent_strangers(now)
        commands: list[SchedulerCommand] = [
            AnnounceSchedulerGone(self._forget(incarnation, now).scheduler_id, incarnation)
            for incarnation in silent
        ]
        # Its last words may have reached only some.
        return commands + (self.ask_all() if silent else [])

    def excuse(self, now: float) -> None:
        """The bus was away: silence until now says nothing."""
        self.strangers.clear()
        for peer in self.known.values():
            peer.heard_s = now

    def _silent_strangers(self, now: float) -> list[Incarnation]:
        """Others know of their bookings; all that they said themselves was lost."""
        delivering = {
            placed.deliverer
            for placed in self.bookings.requests.values()
            if placed.acknowledged_s is None and placed.deliverer not in self.known
        }
        delivering.discard(self.bookings.incarnation)
        self.strangers = {each: self.strangers.get(each, now) for each in delivering}
        return [each for each, since_s in self.strangers.items() if now - since_s > self.lease_s]

    def _ask(self, incarnation: Incarnation, peer: Peer) -> list[SchedulerCommand]:
        if not peer.is_behind or peer.held is not None:
            return []
        written = self.bookings.requests.items()
        peer.held = {each: placed.version for each, placed in written if placed.version.writer == incarnation}
        peer.is_behind = False
        return [ReadPeer(peer.scheduler_id, incarnation)]

    def _forget(self, incarnation: Incarnation, now: float) -> Peer:
        # A stranger's name is not known; nor does anybody need it.
        peer = self.known.pop(incarnation, None) or Peer(incarnation, now, 0)
        self.bookings.is_heard = bool(self.known)
        for request_id, placed in self.bookings.requests.items():
            if placed.deliverer == incarnation and placed.acknowledged_s is None:
                # Nobody will tell whether it was delivered: its instances' reports have to.
                placed.acknowledged_s = now
                self.bookings.note_changed(request_id, placed)
        return peer
