"""What a process did when: a recorder that is off until `lamella trace` asks, and then for a bounded time.

A site defines its event once and brackets the work::

    SEND_Q = define("send Q", "exchange", "layer", "bytes")

    began_ns = timeline.begin()
    ...
    if began_ns:
        timeline.end(began_ns, SEND_Q, layer, nbytes)

Off, ``begin`` is a function that says 0. On, a record of fixed size goes into the thread's own ring: no
lock, no allocation that lasts. Invariants: a thread writes its own ring only; memory is bounded by
``capacity``, ``MAX_RINGS`` and ``MAX_TEXT_BYTES``; what does not fit is counted, the oldest goes first;
nothing that began before the recording or ends after it is kept. Times are ``time.monotonic_ns()``, one clock
for all processes of a host.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, NewType

import msgspec

EventKind = Literal["step", "compute", "exchange", "waiting", "span", "lane", "mark", "counter"]
"""``step``, ``compute``, ``exchange``, ``waiting`` and ``span`` lie on their thread and nest there; what of a
step is none of the next three is Python's. Steps that take turns on a thread, and their waiting, may overlap.
``lane``: work that overlaps with its like, as calls on an event loop do. ``mark``: an instant of one request.
``counter``: values that hold until the next ones."""

EventId = NewType("EventId", int)

CAPACITY = 1 << 17
"""Records a thread: 8 MiB, some seconds of a busy engine's layers."""
MAX_RINGS = 8
MAX_TEXT_BYTES = 1 << 22
"""Of request ids and peers, a thread."""
RECORD = struct.Struct("<qqIII4x4q")
"""Begin and end (ns), event, requests and peer (places in the thread's texts), four values."""
RECORD_BYTES = RECORD.size


class Event(msgspec.Struct, frozen=True):
    """``labels`` name the values, at most four."""

    name: str
    kind: EventKind
    labels: tuple[str, ...]


class ThreadRecords(msgspec.Struct, frozen=True):
    """One thread's records, in the order of their ends.

    ``lost``: overwritten by newer ones. ``texts_lost``: recorded without their requests or peer.
    """

    thread: str
    lost: int
    texts_lost: int
    texts: tuple[str, ...]
    records: bytes


class Recording(msgspec.Struct, frozen=True):
    """What a process recorded between two instants."""

    began_ns: int
    ended_ns: int
    events: tuple[Event, ...]
    threads: tuple[ThreadRecords, ...]


class Record(NamedTuple):
    """``requests`` are ids separated by spaces; ``peer`` is the other side's id, or what there is to say of a
    mark that is of no request. Either may be empty."""

    begin_ns: int
    end_ns: int
    event: EventId
    requests: str
    peer: str
    values: tuple[int, int, int, int]


_events: list[Event] = []


def define(name: str, kind: EventKind, *labels: str) -> EventId:
    """The event's id in this process; the same for the same definition. Called at import."""
    assert len(labels) <= 4, f"event {name!r} has {len(labels)} values, four fit"
    event = Event(name, kind, labels)
    if event not in _events:
        _events.append(event)
    return EventId(_events.index(event))


def name_of(event: EventId) -> str:
    """Of an event of this process."""
    return _events[event].name


def defined_events() -> tuple[Event, ...]:
    """Of this process, by their ids."""
    return tuple(_events)


def records_of(thread: ThreadRecords) -> Iterator[Record]:
    for begin_ns, end_ns, event, requests, peer, *values in RECORD.iter_unpack(thread.records):
        a, b, c, d = values
        yield Record(begin_ns, end_ns, event, thread.texts[requests], thread.texts[peer], (a, b, c, d))


class Timeline:
    """One per process: ``start``, then the sites write, then ``stop`` or the time's end, then ``take``.

    ``begin`` says now, in ns; 0 while nothing is recorded.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.begin: Callable[[], int] = int
        self._capacity = capacity
        self._active: _Rings | None = None
        self._last: _Rings | None = None
        self._own = threading.local()

    @property
    def is_on(self) -> bool:
        return self._active is not None

    # -- what the sites call --------------------------------------------------------------------------------

    def end(
        self,
        began_ns: int,
        event: EventId,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
        requests: str = "",
        peer: str = "",
    ) -> None:
        """Records what began then and ends now. Nothing for ``began_ns`` 0."""
        rings = self._active
        if rings is None or began_ns < rings.began_ns:
            return
        now_ns = time.monotonic_ns()
        if now_ns > rings.until_ns:
            return
        try:
            ring: _Ring = self._own.ring
        except AttributeError:
            ring = self._own.ring = rings.open_ring()
        if ring.rings is not rings:
            ring = self._own.ring = rings.open_ring()
        places = ring.texts
        RECORD.pack_into(
            ring.memory,
            ring.written % ring.capacity * RECORD_BYTES,
            began_ns,
            now_ns,
            event,
            places[requests] if requests in places else ring.keep(requests),
            places[peer] if peer in places else ring.keep(peer),
            a,
            b,
            c,
            d,
        )
        ring.written += 1

    def mark(self, event: EventId, request: str, a: int = 0, *, peer: str = "") -> None:
        """An instant in a request's life."""
        if self._active is not None:
            self.end(time.monotonic_ns(), event, a, 0, 0, 0, request, peer)

    def count(self, event: EventId, a: int, b: int = 0, c: int = 0, d: int = 0) -> None:
        """The counter's values from now on."""
        if self._active is not None:
            self.end(time.monotonic_ns(), event, a, b, c, d)

    # -- what the control side calls ------------------------------------------------------------------------

    def start(self, duration_ns: int) -> int:
        """Begins anew and forgets what was; the instant after which nothing is recorded."""
        self.forget()
        now_ns = time.monotonic_ns()
        self._active = _Rings(now_ns, now_ns + duration_ns, self._capacity)
        self.begin = time.monotonic_ns
        return self._active.until_ns

    def stop(self) -> None:
        """Records nothing more; what was recorded stays until it is taken or forgotten. Safe to repeat."""
        self.begin = int
        rings, self._active = self._active, None
        if rings is not None:
            rings.until_ns = min(rings.until_ns, time.monotonic_ns())
            self._last = rings

    def take(self) -> Recording | None:
        """Ends the recording and gives it out, once; None where there is none."""
        self.stop()
        rings = self._last
        taken = None if rings is None else rings.recording()
        self.forget()
        return taken

    def forget(self) -> None:
        """Frees the memory of what was recorded."""
        self.stop()
        if self._last is not None:
            # A thread's own reference to its ring outlives the recording.
            for ring in self._last.rings:
                ring.release()
            self._last = None


class _Ring:
    """One thread's records. ``written`` counts them all; the last ``capacity`` are there."""

    def __init__(self, rings: "_Rings", thread: str, capacity: int, text_bytes: int) -> None:
        self.rings = rings
        self.thread = thread
        self.capacity = capacity
        self.memory = bytearray(RECORD_BYTES * capacity)
        self.written = 0
        self.texts: dict[str, int] = {"": 0}
        self.texts_lost = 0
        self._text_bytes = text_bytes

    def keep(self, text: str) -> int:
        """The new text's place; the empty text's where memory is used up."""
        if len(text) > self._text_bytes:
            self.texts_lost += 1
            return 0
        self._text_bytes -= len(text)
        return self.texts.setdefault(text, len(self.texts))

    def records(self) -> ThreadRecords:
        oldest = self.written % self.capacity * RECORD_BYTES if self.written > self.capacity else 0
        newest_end = min(self.written, self.capacity) * RECORD_BYTES
        return ThreadRecords(
            thread=self.thread,
            lost=max(0, self.written - self.capacity),
            texts_lost=self.texts_lost,
            texts=tuple(self.texts),
            records=bytes(self.memory[oldest:newest_end] + self.memory[:oldest]),
        )

    def release(self) -> None:
        self.capacity = 1
        self.memory = bytearray(RECORD_BYTES)
        self.texts = {"": 0}


class _Rings:
    """One recording's rings."""

    def __init__(self, began_ns: int, until_ns: int, capacity: int) -> None:
        self.began_ns = began_ns
        self.until_ns = until_ns
        self.rings: list[_Ring] = []
        self._capacity = capacity
        self._opening = threading.Lock()

    def open_ring(self) -> _Ring:
        """For the calling thread. Threads beyond ``MAX_RINGS`` keep their last record only."""
        with self._opening:
            has_room = len(self.rings) < MAX_RINGS
            capacity, text_bytes = (self._capacity, MAX_TEXT_BYTES) if has_room else (1, 0)
            ring = _Ring(self, threading.current_thread().name, capacity, text_bytes)
            self.rings.append(ring)
            return ring

    def recording(self) -> Recording:
        return Recording(
            began_ns=self.began_ns,
            ended_ns=self.until_ns,
            events=defined_events(),
            threads=tuple(ring.records() for ring in self.rings),
        )


timeline = Timeline()
"""This process's."""
