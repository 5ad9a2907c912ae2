"""What is read from the runs of a comparison: figures, their medians over rounds, and ratios to the first
configuration's.

A ratio is of two runs of the same round, which the machine treated most alike; the median of ratios is
reported, not the ratio of medians.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.latency import Distribution
from services.compare.comparison import Comparison
from services.compare.records import RunRecord


@dataclass(frozen=True, slots=True)
class Figure:
    """``of`` is None where a run has nothing to measure it by. Shown in ``unit``, ``scale`` times as much."""

    name: str
    unit: str
    scale: float
    digits: int
    of: Callable[[RunRecord], float | None]

    def show(self, value: float | None) -> str:
        return "–" if value is None else f"{value * self.scale:,.{self.digits}f}"


def _mean(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.mean_s


def _p90(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.p90_s


def _attained(record: RunRecord) -> float | None:
    attainment = record.load.attainment
    return None if attainment is None else attainment.share


TTFT = Figure("TTFT", "s", 1.0, 2, lambda record: _mean(record.load.ttft))
TTFT_P90 = Figure("TTFT p90", "s", 1.0, 2, lambda record: _p90(record.load.ttft))
TPOT = Figure("TPOT", "ms", 1e3, 0, lambda record: _mean(record.load.tpot))
TPOT_P90 = Figure("TPOT p90", "ms", 1e3, 0, lambda record: _p90(record.load.tpot))
JCT = Figure("JCT", "s", 1.0, 1, lambda record: _mean(record.load.end_to_end))
JCT_P90 = Figure("JCT p90", "s", 1.0, 1, lambda record: _p90(record.load.end_to_end))
GOODPUT = Figure("goodput", "requests/s", 1.0, 2, lambda record: record.load.goodput_per_s)
ATTAINED = Figure("within objectives", "%", 100.0, 0, _attained)
RESOURCE_TIME = Figure("resource time", "s", 1.0, 0, lambda record: record.resource_time_s)
PROCESSOR = Figure("processor", "s", 1.0, 0, lambda record: record.instances_cpu_s + record.services_cpu_s)

DRAWN = (TTFT, TPOT, JCT, GOODPUT, RESOURCE_TIME, PROCESSOR)


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of one configuration on one workload, one a round."""

    workload: str
    configuration: str
    runs: tuple[RunRecord, ...]

    def values(self, figure: Figure) -> list[float]:
        return [value for run in self.runs if (value := figure.of(run)) is not None]

    def median(self, figure: Figure) -> float | None:
        values = self.values(figure)
        return statistics.median(values) if values else None

    @property
    def not_served(self) -> int:
        return sum(run.load.requests - run.load.served for run in self.runs)


def make_cells(comparison: Comparison, records: Iterable[RunRecord]) -> list[Cell]:
    """In the comparison's order, without those that were never run."""
    by_pair: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        by_pair.setdefault((record.workload, record.configuration), []).append(record)
    return [
        Cell(offer.name, candidate.name, tuple(runs))
        for offer in comparison.workload
        for candidate in comparison.configuration
        if (runs := by_pair.get((offer.name, candidate.name)))
    ]


def median_ratio(cell: Cell, baseline: Cell, figure: Figure) -> float | None:
    """Over the rounds that both have run; None without one, or where the baseline's is nothing."""
    others = {run.round_number: figure.of(run) for run in baseline.runs}
    ratios = []
    for run in cell.runs:
        own, other = figure.of(run), others.get(run.round_number)
        if own is not None and other:
            ratios.append(own / other)
    return statistics.median(ratios) if ratios else None


def markdown_table(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """A row a workload and configuration; in brackets the ratio to the first configuration's."""
    first = comparison.configuration[0].name
    baselines = {cell.workload: cell for cell in cells if cell.configuration == first}
    lines = [
        "| workload | configuration | TTFT mean, p90, s | TPOT mean, p90, ms | JCT mean, p90, s"
        " | goodput, requests/s | within objectives | resource time, s | processor, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        baseline = baselines.get(cell.workload, cell)

        def compared(
            figure: Figure, tail: Figure | None = None, cell: Cell = cell, baseline: Cell = baseline
        ) -> str:
            shown = figure.show(cell.median(figure))
            if tail is not None:
                shown += f", {tail.show(cell.median(tail))}"
            ratio = None if cell is baseline else median_ratio(cell, baseline, figure)
            return shown if ratio is None else f"{shown} ({ratio:.2f} ×)"

        unserved = f", {cell.not_served} not served" if cell.not_served else ""
        columns = (
            cell.workload.upper() if cell.workload != "mixed" else "Mixed",
            cell.configuration,
            compared(TTFT, TTFT_P90),
            compared(TPOT, TPOT_P90),
            compared(JCT, JCT_P90),
            compared(GOODPUT),
            f"{ATTAINED.show(cell.median(ATTAINED))} %{unserved}",
            compared(RESOURCE_TIME),
            compared(PROCESSOR),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"
