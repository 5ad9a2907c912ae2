"""Where each service's time went: of an engine's steps, by what was done in them; of an event loop, how busy.

A slice's own time is what its inner slices leave. Within steps a service computes, exchanges, waits (nothing
else goes on), or, where no hook says otherwise, runs Python.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.table import Table

from common.timeline import EventKind
from services.tracing.layout import Layout, ServiceLayout, Slice

WORK: tuple[EventKind, ...] = ("compute", "exchange")


@dataclass(slots=True)
class ServiceSummary:
    """``busy_ns``: of the busiest thread, within ``duration_ns``. ``in_steps_ns``: with a step under way, for
    each thread that computes, and what of it is of which kind; the rest is Python's."""

    service_id: str
    duration_ns: int
    busy_ns: int = 0
    steps_ns: list[int] = field(default_factory=list)
    in_steps_ns: int = 0
    compute_ns: int = 0
    exchange_ns: int = 0
    waiting_ns: int = 0

    @property
    def python_ns(self) -> int:
        return self.in_steps_ns - self.compute_ns - self.exchange_ns - self.waiting_ns


def summarize(layout: Layout) -> list[ServiceSummary]:
    return [_summarize_service(each) for each in layout.services]


def _summarize_service(service: ServiceLayout) -> ServiceSummary:
    steps = [each for track in service.tracks for each in track.slices if each.kind == "step"]
    spans = _spans(steps)
    own_ns = dict.fromkeys(WORK, 0)
    anybodys = [
        each for lane in service.lanes for each in _inside(lane.slices, spans) if each.kind == "waiting"
    ]
    computing, waiting_ns = 0, 0
    for thread in service.threads:
        inside = _inside(thread.slices, spans)
        _add_own_times(inside, own_ns)
        working = [each for each in inside if each.kind in WORK]
        waiting = [each for each in inside if each.kind == "waiting"]
        if working or waiting:
            computing += 1
            waiting_ns += _covered_ns([*waiting, *anybodys, *working]) - _covered_ns(working)
    return ServiceSummary(
        service_id=service.service.service_id,
        duration_ns=service.duration_ns,
        busy_ns=max((_covered_ns(track.slices) for track in service.threads), default=0),
        steps_ns=[each.duration_ns for each in steps],
        in_steps_ns=max(1, computing) * _covered_ns(steps),
        compute_ns=own_ns["compute"],
        exchange_ns=own_ns["exchange"],
        waiting_ns=waiting_ns,
    )


def _add_own_times(slices: Sequence[Slice], own_ns: dict[EventKind, int]) -> None:
    """Of a thread's nested slices, by their beginning."""
    enclosing: list[Slice] = []
    for each in slices:
        while enclosing and enclosing[-1].end_ns <= each.begin_ns:
            enclosing.pop()
        if enclosing and enclosing[-1].kind in own_ns:
            own_ns[enclosing[-1].kind] -= each.duration_ns
        if each.kind in own_ns:
            own_ns[each.kind] += each.duration_ns
        enclosing.append(each)


def _spans(slices: Iterable[Slice]) -> list[tuple[int, int]]:
    """When at least one of them was going on."""
    spans: list[tuple[int, int]] = []
    for each in sorted(slices, key=lambda each: each.begin_ns):
        if spans and each.begin_ns <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], each.end_ns))
        else:
            spans.append((each.begin_ns, each.end_ns))
    return spans


def _covered_ns(slices: Iterable[Slice]) -> int:
    return sum(end_ns - begin_ns for begin_ns, end_ns in _spans(slices))


def _inside(slices: Iterable[Slice], spans: Sequence[tuple[int, int]]) -> list[Slice]:
    """Those wholly within a span: the insides of a step that was not recorded whole belong to none."""
    found = []
    for each in slices:
        index = bisect_right(spans, each.begin_ns, key=lambda span: span[0]) - 1
        if index >= 0 and each.end_ns <= spans[index][1]:
            found.append(each)
    return found


def summary_table(summaries: Sequence[ServiceSummary]) -> Table:
    table = Table(box=None)
    table.add_column("service", no_wrap=True)
    headings = ("busy", "steps", "step ms", "compute", "exchange", "waiting", "Python")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in summaries:
        cells = [""] * 6
        if each.steps_ns:
            parts_ns = (each.compute_ns, each.exchange_ns, each.waiting_ns, each.python_ns)
            shares = [f"{part_ns / each.in_steps_ns:.1%}" for part_ns in parts_ns]
            cells = [str(len(each.steps_ns)), f"{median(each.steps_ns) / 1e6:.2f}", *shares]
        busy = f"{each.busy_ns / max(1, each.duration_ns):.1%}"
        table.add_row(each.service_id, busy, *cells)
    return table
