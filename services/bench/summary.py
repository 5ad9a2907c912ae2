"""From outcomes to figures: what one load of a run measured. Pure; the definitions are ``common.latency``'s.

Failed requests have no latency but count against attainment. Requests that the run's end cut off count as
neither; the gaps between the tokens they got do count: for a background load they are what is measured.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from common.latency import (
    Attainment,
    Distribution,
    ServiceObjectives,
    describe,
    end_to_end_s,
    goodput_per_s,
    normalized_latency_s,
    slo_attainment,
    token_gaps_s,
    tpot_s,
    ttft_s,
)
from services.bench.client import Outcome
from services.bench.config import BenchConfig
from services.bench.plan import Truncations

LATE_S = 0.010
"""A request sent later than this after it was due is counted as late: the client is not keeping up."""
BUSY_CLIENT_SHARE = 0.85
"""Above this share of one core, the client's own times are suspect."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Window:
    """The span of time that is measured, on the client's monotonic clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, moment_s: float) -> bool:
        return self.start_s <= moment_s <= self.end_s


@dataclass(frozen=True, slots=True)
class Samples:
    """Every single measurement of a load, in seconds: what distributions and pictures are made of."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    tbt_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load's figures. Rates are per second of ``elapsed_s``; None means that nothing was measured."""

    name: str
    offered: str
    elapsed_s: float
    requests: int
    served: int
    failed: int
    cut: int
    failures: tuple[FailureCount, ...]
    ttft: Distribution | None
    tpot: Distribution | None
    tbt: Distribution | None
    end_to_end: Distribution | None
    normalized_latency: Distribution | None
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    attainment: Attainment | None
    goodput_per_s: float | None
    lateness: Distribution | None
    late: int
    tokens_per_event: float | None
    other_prompt_length: int
    without_usage: int
    without_done: int
    truncated: Truncations


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A whole run. ``client_cpu_share`` is of one core; ``is_interrupted``: ended by the user."""

    started_at: datetime
    config: BenchConfig
    model: str
    loads: tuple[LoadResult, ...]
    client_cpu_share: float
    is_interrupted: bool

    @property
    def served(self) -> int:
        return sum(load.served for load in self.loads)


def load_window(outcomes: Sequence[Outcome]) -> Window | None:
    """From the first arrival to the last response's end; None without requests."""
    if not outcomes:
        return None
    return Window(min(one.arrival_s for one in outcomes), max(one.finished_s for one in outcomes))


def collect_samples(outcomes: Iterable[Outcome], window: Window) -> Samples:
    """Measurements that end in ``window``; cut requests give their gaps and the time per token so far."""
    first_s: list[float] = []
    per_token_s: list[float] = []
    gaps_s: list[float] = []
    whole_s: list[float] = []
    for one in outcomes:
        if one.failure is not None:
            continue
        times_s = [moment_s for moment_s in one.token_times_s if window.holds(moment_s)]
        if not times_s:
            continue
        gaps_s.extend(token_gaps_s(times_s))
        is_whole = one.is_served and len(times_s) == len(one.token_times_s)
        tokens = one.counted_output_tokens if is_whole else len(times_s)
        mean_s = tpot_s(times_s[0], times_s[-1], tokens)
        if mean_s is not None:
            per_token_s.append(mean_s)
        if window.holds(one.arrival_s):
            first_s.append(ttft_s(one.arrival_s, times_s[0]))
        if one.is_served and window.holds(one.arrival_s) and window.holds(one.finished_s):
            whole_s.append(end_to_end_s(one.arrival_s, one.finished_s))
    return Samples(tuple(first_s), tuple(per_token_s), tuple(gaps_s), tuple(whole_s))


def summarize(
    name: str,
    offered: str,
    outcomes: Sequence[Outcome],
    window: Window,
    objectives: ServiceObjectives | None,
    truncated: Truncations,
) -> tuple[LoadResult, Samples]:
    """The figures of one load, and the samples behind them."""
    samples = collect_samples(outcomes, window)
    served = [one for one in outcomes if one.is_served]
    failed = sum(one.failure is not None for one in outcomes)
    finished = [one for one in served if window.holds(one.finished_s)]
    output_tokens = _output_tokens(outcomes, window)
    prompt_tokens = sum(_prompt_tokens(one) for one in finished)
    # A run without a span of time (no answer at all) has no rate.
    span_s = window.length_s or float("inf")
    attainment = None if objectives is None else _attainment(served, failed, objectives)
    lateness_s = [max(0.0, one.sent_s - one.due_s) for one in outcomes]
    events = sum(len(one.token_times_s) for one in served)
    return (
        LoadResult(
            name=name,
            offered=offered,
            elapsed_s=window.length_s,
            requests=len(outcomes),
            served=len(served),
            failed=failed,
            cut=sum(one.is_cut for one in outcomes),
            failures=count_failures(outcomes),
            ttft=describe(samples.ttft_s),
            tpot=describe(samples.tpot_s),
            tbt=describe(samples.tbt_s),
            end_to_end=describe(samples.end_to_end_s),
            normalized_latency=describe(_normalized_s(finished)),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            requests_per_s=len(finished) / span_s,
            prompt_tokens_per_s=prompt_tokens / span_s,
            output_tokens_per_s=output_tokens / span_s,
            attainment=attainment,
            goodput_per_s=None if attainment is None else goodput_per_s(attainment.met, span_s),
            lateness=describe(lateness_s),
            late=sum(late_s > LATE_S for late_s in lateness_s),
            tokens_per_event=sum(one.counted_output_tokens for one in served) / events if events else None,
            other_prompt_length=sum(
                one.usage is not None and one.usage.prompt_tokens != one.prompt_tokens for one in served
            ),
            without_usage=sum(one.usage is None for one in served),
            without_done=sum(not one.has_done for one in served),
            truncated=replace(truncated),
        ),
        samples,
    )


def count_failures(outcomes: Iterable[Outcome]) -> tuple[FailureCount, ...]:
    """Failures by kind, the most frequent first, each with one message."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for one in outcomes:
        if one.failure is not None:
            counts[one.failure.kind] += 1
            examples.setdefault(one.failure.kind, one.failure.message)
    return tuple(FailureCount(kind, number, examples[kind]) for kind, number in counts.most_common())


def _attainment(served: Sequence[Outcome], failed: int, objectives: ServiceObjectives) -> Attainment | None:
    return slo_attainment([one.latency for one in served], failed, objectives)


def _output_tokens(outcomes: Iterable[Outcome], window: Window) -> int:
    """Tokens that arrived in the window: the server's count where a request lies wholly inside."""
    total = 0
    for one in outcomes:
        if one.is_served and window.holds(one.arrival_s) and window.holds(one.finished_s):
            total += one.counted_output_tokens
        elif one.failure is None:
            total += sum(map(window.holds, one.token_times_s))
    return total


def _prompt_tokens(one: Outcome) -> int:
    return one.usage.prompt_tokens if one.usage is not None else one.prompt_tokens


def _normalized_s(served: Iterable[Outcome]) -> list[float]:
    each_s = (
        normalized_latency_s(one.arrival_s, one.finished_s, one.counted_output_tokens) for one in served
    )
    return [value_s for value_s in each_s if value_s is not None]
