"""What requests ask for: means that bound what an instance can do, and the requests of a probe."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from services.bench.arrivals import burstiness_of
from services.bench.traces import TraceRequest
from services.simulator.run import check_rate

SAMPLED = 512
"""Prompts that stand for all where passes are counted."""


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """Means over requests. ``decoded``: tokens after the first; ``context_tokens``: that such a token attends
    to; ``prompts``: evenly spaced ones. ``burstiness``: of its own arrivals, where it has some."""

    requests: int
    prompt_tokens: float
    decoded: float
    context_tokens: float
    prompts: tuple[int, ...]
    rate_per_s: float | None
    burstiness: float | None = None


def workload_of(rows: Sequence[TraceRequest]) -> PlannedWorkload:
    count = len(rows)
    decoded = sum(row.output_tokens - 1 for row in rows)
    attended = sum((row.output_tokens - 1) * (row.prompt_tokens + row.output_tokens / 2) for row in rows)
    last_s = rows[-1].arrival_s
    return PlannedWorkload(
        requests=count,
        prompt_tokens=sum(row.prompt_tokens for row in rows) / count,
        decoded=decoded / count,
        context_tokens=attended / decoded if decoded else 0.0,
        prompts=tuple(row.prompt_tokens for row in spaced(rows, SAMPLED)),
        rate_per_s=(count - 1) / last_s if last_s else None,
        burstiness=burstiness_of([row.arrival_s for row in rows if row.arrival_s is not None]),
    )


def spaced(rows: Sequence[TraceRequest], count: int) -> Iterator[TraceRequest]:
    """So many of them from beginning to end, in order; all where there are no more. A trace's first rows are
    of one hour and one mood, these are of all."""
    kept = min(count, len(rows))
    for number in range(kept):
        yield rows[number * len(rows) // kept]


def rate_of(rate_per_s: float | None, workload: PlannedWorkload) -> float:
    """What is asked for, else what the trace brings. Raises ConfigError."""
    if rate_per_s is not None:
        check_rate(rate_per_s)
        return rate_per_s
    if workload.rate_per_s is None:
        raise ConfigError("--rate", None, "is needed: the requests have lengths alone, no arrivals")
    return workload.rate_per_s
