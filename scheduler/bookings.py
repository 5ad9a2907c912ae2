"""Which requests are booked where, by any scheduler.

A change made here is told to the others; one of theirs is taken over if its version is higher than what is
known. What is not booked any more is remembered by its version for a while, so that word which comes late,
or from somebody who missed the end, books nothing again.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import RequestCancelled
from common.ids import Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import Placement
from common.messages.bookings import BookedRequest, Booking, BookingVersion
from scheduler.views import BookedWork, InstanceView, PlacedRequest

REMEMBERED_S = 60.0
"""What is booked no more, at least for so long: longer than a word can be late, of a scheduler that hung or
was cut off, before it is taken for dead and what it says is asked for anew."""
MOST_REMEMBERED = 1 << 17
"""Whatever the rate: some tens of megabytes, and a minute of 2,000 requests a second."""


@dataclass(slots=True)
class Bookings:
    """``incarnation``: whose changes are made here. ``instances`` are the state's own; ``requests`` are
    those that are booked, ``unbooked`` the versions of those that were, the latest last, and ``unbooked_s``
    when they ended. ``changed`` counts this scheduler's changes; ``changes`` are those that are not told yet.
    """

    incarnation: Incarnation
    instances: dict[InstanceId, InstanceView]
    requests: dict[RequestId, PlacedRequest] = field(default_factory=dict)
    unbooked: OrderedDict[RequestId, BookingVersion] = field(default_factory=OrderedDict)
    unbooked_s: dict[RequestId, float] = field(default_factory=dict)
    now_s: float = 0.0
    changed: int = 0
    is_heard: bool = False
    """Whether there is another scheduler: to nobody nothing is told."""
    changes: list[RequestId] = field(default_factory=list)
    _look_s: float = 0.0
    """Before then nothing has been remembered for long enough."""

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        assert not self.unbooked.keys() & self.requests.keys(), "a booking stands that was ended"
        assert self.unbooked.keys() == self.unbooked_s.keys(), "nobody knows when a booking ended"
        for request_id, placed in self.requests.items():
            for view in self._views(placed.placement):
                is_counted = request_id in view.placed
                assert is_counted != placed.is_void, "an instance lost a placed request, or counts a void one"
        for view in self.instances.values():
            assert view.placed <= self.requests.keys(), "an instance keeps a request that is over"
            booked = BookedWork()
            for request_id in view.placed:
                booked.add(view.instance_id, self.requests[request_id], 1)
            assert view.booked == booked, "the sums of what is booked are wrong"

    def pass_time(self, now: float) -> None:
        """To be called with every event: what ends is remembered from the latest one on."""
        if now > self.now_s:
            self.now_s = now
        if self.now_s >= self._look_s or len(self.unbooked) > MOST_REMEMBERED:
            self._forget_old()

    def _forget_old(self) -> None:
        unbooked = self.unbooked
        while unbooked:
            oldest = next(iter(unbooked))
            ended_s = self.unbooked_s[oldest]
            if self.now_s - ended_s <= REMEMBERED_S and len(unbooked) <= MOST_REMEMBERED:
                self._look_s = ended_s + REMEMBERED_S
                return
            self._forget(oldest)
        self._look_s = self.now_s + REMEMBERED_S

    def version_of(self, request_id: RequestId) -> BookingVersion:
        placed = self.requests.get(request_id)
        return self.unbooked.get(request_id, BookingVersion.NONE) if placed is None else placed.version

    @contextmanager
    def uncounted(self, request_id: RequestId) -> Iterator[None]:
        """Its booking stands, and nobody counts it meanwhile: it is to be chosen where it had better be."""
        placed = self.requests.get(request_id)
        if placed is None or placed.is_void:
            yield
            return
        self._uncount(request_id, placed)
        try:
            yield
        finally:
            self._count(request_id, placed)

    def check_wanted(self, request_id: RequestId, attempt: int) -> None:
        """Raises RequestCancelled for an attempt that is over or superseded."""
        known = self.version_of(request_id)
        if known.attempt > attempt or (known.attempt == attempt and known.is_over):
            raise RequestCancelled(f"request {request_id} has ended or been submitted again since")

    # changes made here

    def book(self, request_id: RequestId, attempt: int, placed: PlacedRequest) -> None:
        """In the place of what is booked of the request."""
        placed.version = self._next(request_id, attempt)
        self.drop(request_id)
        self._keep(request_id, placed)
        self._tell(request_id)

    def note_changed(self, request_id: RequestId, placed: PlacedRequest) -> None:
        """Of its deliverer, its expected length or its acknowledgement."""
        placed.version = self._next(request_id, placed.version.attempt)
        self._tell(request_id)

    def expect(
        self, request_id: RequestId, placed: PlacedRequest, lengths: LengthDistribution, drawn_tokens: int
    ) -> None:
        """Of one that is not void. Another scheduler may have moved it to an instance not known here."""
        self._uncount(request_id, placed)
        placed.expect(lengths, drawn_tokens)
        self._count(request_id, placed)
        self.note_changed(request_id, placed)

    def unbook(self, request_id: RequestId) -> None:
        """That placement came to nothing; the attempt may be booked again."""
        version = self._next(request_id, self.version_of(request_id).attempt)
        self._remember(request_id, version)
        self._tell(request_id)

    def end(self, request_id: RequestId, attempt: int) -> None:
        """The gateway's word, which every scheduler hears from itself."""
        version = BookingVersion(attempt, is_over=True)
        if version > self.version_of(request_id):
            self._remember(request_id, version)

    def drop(self, request_id: RequestId) -> None:
        """As seen from here it is gone, with an instance or a gateway; others will see the same."""
        placed = self.requests.get(request_id)
        if placed is not None:
            self._remember(request_id, placed.version)

    def void(self, request_id: RequestId) -> None:
        """An instance of its placement is gone amid its delivery."""
        placed = self.requests[request_id]
        placed.is_void = True
        self._uncount(request_id, placed)

    def count_known(self, view: InstanceView) -> None:
        """Of an instance that came, or was heard of, later than bookings on it."""
        for request_id, placed in self.requests.items():
            if not placed.is_void and view in self._views(placed.placement):
                view.book(request_id, placed)

    # others' changes

    def merge(self, booking: Booking, now: float) -> bool:
        """Whether it said something new."""
        if booking.version <= self.version_of(booking.request_id):
            return False
        booked = booking.booked
        if booked is None:
            self._remember(booking.request_id, booking.version)
            return True
        known = self.requests.get(booking.request_id)
        placed = _placed(booking.version, booked)
        is_same = known is not None and known.placement == booked.placement
        if booked.is_acknowledged:
            placed.acknowledged_s, placed.is_reported = now, True
            if known is not None and is_same:
                # Its next report counts the prompt, if none has yet.
                placed.is_reported = known.is_reported
                placed.acknowledged_s = now if known.acknowledged_s is None else known.acknowledged_s
        placed.is_void = known is not None and is_same and known.is_void
        self.drop(booking.request_id)
        self._keep(booking.request_id, placed)
        return True

    def read(self, after: RequestId | None, most: int) -> tuple[tuple[Booking, ...], bool]:
        """What is known of requests after that one, and whether that is all."""
        names = (name for name in (*self.requests, *self.unbooked) if after is None or name > after)
        page = heapq.nsmallest(most + 1, names)
        return self.named(page[:most]), len(page) <= most

    def named(self, names: Iterable[RequestId]) -> tuple[Booking, ...]:
        """What is known of each."""
        return tuple(map(self._booking, names))

    def take_changes(self) -> tuple[Booking, ...]:
        """To be told to the others now."""
        told, self.changes = dict.fromkeys(self.changes), []
        self.changed += len(told)
        return self.named(told)

    def own(self) -> dict[RequestId, BookingVersion]:
        """Those that stand and were last changed here."""
        booked = self.requests.items()
        return {each: placed.version for each, placed in booked if placed.version.writer == self.incarnation}

    # both

    def _next(self, request_id: RequestId, attempt: int) -> BookingVersion:
        known = self.version_of(request_id)
        revision = known.revision + 1 if known.attempt == attempt else 0
        return BookingVersion(attempt, False, revision, self.incarnation)

    def _tell(self, request_id: RequestId) -> None:
        if self.is_heard:
            self.changes.append(request_id)
        else:
            self.changed += 1

    def _booking(self, request_id: RequestId) -> Booking:
        placed = self.requests.get(request_id)
        booked = None if placed is None else _booked(placed)
        return Booking(request_id, self.version_of(request_id), booked)

    def _keep(self, request_id: RequestId, placed: PlacedRequest) -> None:
        self._forget(request_id)
        self.requests[request_id] = placed
        if not placed.is_void:
            self._count(request_id, placed)

    def _remember(self, request_id: RequestId, version: BookingVersion) -> None:
        """It is booked no more, with that version."""
        placed = self.requests.pop(request_id, None)
        if placed is not None:
            self._uncount(request_id, placed)
        self._forget(request_id)
        self.unbooked[request_id], self.unbooked_s[request_id] = version, self.now_s

    def _forget(self, request_id: RequestId) -> None:
        self.unbooked.pop(request_id, None)
        self.unbooked_s.pop(request_id, None)

    def _count(self, request_id: RequestId, placed: PlacedRequest) -> None:
        for view in self._views(placed.placement):
            view.book(request_id, placed)

    def _uncount(self, request_id: RequestId, placed: PlacedRequest) -> None:
        for view in self._views(placed.placement):
            view.unbook(request_id, placed)

    def _views(self, placement: Placement) -> list[InstanceView]:
        """Of those of its instances that are known in that very life."""
        found, decode_instance = [], placement.decode_instance
        if placement.prefill_instance != decode_instance:
            view = self.instances.get(placement.prefill_instance)
            if view is not None and view.record.incarnation == placement.prefill_incarnation:
                found.append(view)
        view = self.instances.get(decode_instance)
        if view is not None and view.record.incarnation == placement.decode_incarnation:
            found.append(view)
        return found


def _booked(placed: PlacedRequest) -> BookedRequest:
    return BookedRequest(
        placed.gateway_id,
        placed.placement,
        placed.prompt_tokens,
        placed.expected_tokens,
        placed.is_heavy,
        placed.deliverer,
        placed.acknowledged_s is not None,
        placed.predicted,
    )


def _placed(version: BookingVersion, booked: BookedRequest) -> PlacedRequest:
    return PlacedRequest(
        booked.placement,
        version,
        booked.gateway_id,
        booked.prompt_tokens,
        booked.deliverer,
        expected_tokens=booked.expected_tokens,
        is_heavy=booked.is_heavy,
        predicted=booked.predicted,
    )
