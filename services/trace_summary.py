"""Where each service's time went: of an engine's steps, by what was done in them; of an event loop, how busy.

A slice's own time is what its inner slices leave. Within a step it is computing, exchanging, waiting, or,
where no hook says otherwise, Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.table import Table

from common.timeline import EventKind
from services.trace_layout import Layout, ServiceLayout, Slice

SHARES: tuple[EventKind, ...] = ("compute", "exchange", "waiting")


@dataclass(slots=True)
class ServiceSummary:
    """``busy_ns``: of the busiest thread, within ``duration_ns``. ``own_ns``: of all steps' insides, by kind;
    what they leave of ``steps_ns`` is Python's."""

    service_id: str
    duration_ns: int
    busy_ns: int = 0
    steps_ns: list[int] = field(default_factory=list)
    own_ns: dict[EventKind, int] = field(default_factory=lambda: dict.fromkeys(SHARES, 0))
    records: int = 0
    lost: int = 0

    def share(self, kind: EventKind) -> float:
        """Of the steps' time."""
        return self.own_ns[kind] / sum(self.steps_ns)

    @property
    def python_share(self) -> float:
        return 1 - sum(self.own_ns.values()) / sum(self.steps_ns)


def summarize(layout: Layout) -> list[ServiceSummary]:
    return [_summarize_service(each) for each in layout.services]


def _summarize_service(service: ServiceLayout) -> ServiceSummary:
    summary = ServiceSummary(
        service.service.service_id, service.duration_ns, records=service.records, lost=service.lost
    )
    for track in service.threads:
        summary.busy_ns = max(summary.busy_ns, _account(track.slices, summary))
    return summary


def _account(slices: Sequence[Slice], summary: ServiceSummary) -> int:
    """Adds a thread's steps to the summary; the time during which anything was going on there."""
    busy_ns = 0
    enclosing: list[Slice] = []
    for each in slices:
        while enclosing and enclosing[-1].end_ns <= each.begin_ns:
            enclosing.pop()
        if not enclosing:
            busy_ns += each.duration_ns
        is_in_step = any(outer.kind == "step" for outer in enclosing)
        if is_in_step and enclosing[-1].kind in SHARES:
            summary.own_ns[enclosing[-1].kind] -= each.duration_ns
        if is_in_step and each.kind in SHARES:
            summary.own_ns[each.kind] += each.duration_ns
        if each.kind == "step" and not is_in_step:
            summary.steps_ns.append(each.duration_ns)
        enclosing.append(each)
    return busy_ns


def summary_table(summaries: Sequence[ServiceSummary]) -> Table:
    table = Table(box=None)
    table.add_column("service")
    for heading in ("busy", "steps", "step ms", *SHARES, "Python", "records", "lost"):
        table.add_column(heading, justify="right")
    for each in summaries:
        cells = ["", "", "", "", "", ""]
        if each.steps_ns:
            shares = (*(each.share(kind) for kind in SHARES), each.python_share)
            step_ms = median(each.steps_ns) / 1e6
            cells = [str(len(each.steps_ns)), f"{step_ms:.2f}", *(f"{share:.1%}" for share in shares)]
        busy = f"{each.busy_ns / max(1, each.duration_ns):.1%}"
        table.add_row(each.service_id, busy, *cells, str(each.records), str(each.lost))
    return table
