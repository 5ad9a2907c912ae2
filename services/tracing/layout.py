"""What a mesh recorded, laid out to be looked at: services, their tracks, and what lies on each.

A thread is a track, on which slices nest. Work of one name that overlaps with its like gets as many tracks as
are needed: calls do, and so do steps that take turns on one thread. All times are ns since the trace began,
on one clock.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from common.timeline import EventKind, ThreadRecords, records_of
from services.tracing.collect import MeshTrace, ServiceTrace, Silent

KINDS = ("gateway", "scheduler", "prefill", "decode", "mixed", "attention", "predictor")
"""The order of a request's walk."""
TAKING_TURNS: tuple[EventKind, ...] = ("step", "waiting")
"""Kinds that overlap on a thread where several batches are under way."""


@dataclass(frozen=True, slots=True)
class Slice:
    begin_ns: int
    end_ns: int
    name: str
    kind: EventKind
    requests: tuple[str, ...]
    peer: str
    values: dict[str, int]

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Track:
    """``slices`` by their beginning, the longer first: each lies within or after those before it."""

    name: str
    slices: tuple[Slice, ...]


@dataclass(slots=True)
class ServiceLayout:
    """``marks`` and ``counters`` by time. ``lost`` records were overwritten; ``texts_lost`` have no ids."""

    service: ServiceTrace
    duration_ns: int
    threads: list[Track] = field(default_factory=list)
    lanes: list[Track] = field(default_factory=list)
    marks: list[Slice] = field(default_factory=list)
    counters: list[Slice] = field(default_factory=list)
    lost: int = 0
    texts_lost: int = 0

    @property
    def tracks(self) -> list[Track]:
        return [*self.threads, *self.lanes]


@dataclass(frozen=True, slots=True)
class Layout:
    duration_ns: int
    services: tuple[ServiceLayout, ...]
    silent: tuple[Silent, ...]


def lay_out(trace: MeshTrace) -> Layout:
    """The services in the order of a request's walk, then by id."""
    ordered = sorted(trace.services, key=lambda each: (KINDS.index(each.kind), each.service_id))
    return Layout(
        duration_ns=trace.ended_ns - trace.began_ns,
        services=tuple(_lay_out_service(each, trace.began_ns) for each in ordered),
        silent=trace.silent,
    )


def _lay_out_service(service: ServiceTrace, began_ns: int) -> ServiceLayout:
    recording = service.recording
    layout = ServiceLayout(service, recording.ended_ns - recording.began_ns)
    zero_ns = began_ns + service.clock.offset_ns
    lanes: list[Slice] = []
    for thread in recording.threads:
        layout.lost += thread.lost
        layout.texts_lost += thread.texts_lost
        nested = []
        for each in _slices(service, thread, zero_ns):
            if each.kind == "mark":
                layout.marks.append(each)
            elif each.kind == "counter":
                layout.counters.append(each)
            elif each.kind == "lane":
                lanes.append(each)
            else:
                nested.append(each)
        name = "event loop" if thread.thread == "MainThread" else thread.thread
        nested = _by_begin(nested)
        while crossing := _crossing(nested):
            lanes += [each for each in nested if each.name in crossing]
            nested = [each for each in nested if each.name not in crossing]
        layout.threads.append(Track(name, tuple(nested)))
    for name in dict.fromkeys(each.name for each in lanes):
        layout.lanes.extend(_lanes(name, [each for each in lanes if each.name == name]))
    layout.marks.sort(key=lambda each: each.begin_ns)
    layout.counters.sort(key=lambda each: each.begin_ns)
    return layout


def _slices(service: ServiceTrace, thread: ThreadRecords, zero_ns: int) -> Iterator[Slice]:
    """A thread's records. Where some are lost, also without those whose insides may be among the lost."""
    records = list(records_of(thread))
    horizon_ns = records[0].end_ns if thread.lost else 0
    for record in records:
        if record.begin_ns < horizon_ns:
            continue
        event = service.recording.events[record.event]
        yield Slice(
            begin_ns=record.begin_ns - zero_ns,
            end_ns=record.end_ns - zero_ns,
            name=event.name,
            kind=event.kind,
            requests=tuple(dict.fromkeys(record.requests.split())),
            peer=record.peer,
            values=dict(zip(event.labels, record.values, strict=False)),
        )


def _by_begin(slices: Iterable[Slice]) -> list[Slice]:
    return sorted(slices, key=lambda each: (each.begin_ns, -each.end_ns))


def _crossing(slices: Sequence[Slice]) -> set[str]:
    """Names of steps and waiting that do not nest: one ends within another, or work goes on in a wait."""
    found: set[str] = set()
    enclosing: list[Slice] = []
    for each in slices:
        while enclosing and enclosing[-1].end_ns <= each.begin_ns:
            enclosing.pop()
        if enclosing:
            outer = enclosing[-1]
            if each.end_ns > outer.end_ns:
                found |= {side.name for side in (each, outer) if side.kind in TAKING_TURNS}
            elif outer.kind == "waiting":
                found.add(outer.name)
        enclosing.append(each)
    return found


def _lanes(name: str, slices: Iterable[Slice]) -> list[Track]:
    """As few tracks as hold the slices without overlap."""
    lanes: list[list[Slice]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for each in _by_begin(slices):
        while busy and busy[0][0] <= each.begin_ns:
            heappush(free, heappop(busy)[1])
        if not free:
            lanes.append([])
            heappush(free, len(lanes) - 1)
        lane = heappop(free)
        lanes[lane].append(each)
        heappush(busy, (each.end_ns, lane))
    return [
        Track(name if index == 0 else f"{name} {index + 1}", tuple(lane)) for index, lane in enumerate(lanes)
    ]
