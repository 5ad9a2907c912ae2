"""What the mesh's times mean: the only definitions of TTFT, TPOT, TBT, end-to-end, attainment and goodput.

Pure: no clock, no IO. A time is seconds on one monotonic clock; a duration is seconds. Services, simulator
and benchmark all compute through here, so a figure of one can be laid beside a figure of another.

The field's words differ; these are ours:

- **TTFT**: first token's arrival − the request's arrival; queueing and prefill are inside (DistServe 2).
- **TPOT**: (last − first token's arrival) / (tokens − 1), one value a request; a stall is averaged away
  (DistServe 1, 2).
- **TBT**: every single gap between two tokens of a request, pooled over requests; it shows the stall
  (Vidur 5; Splitwise's Table II averages it over a request, which is our TPOT).
- **end-to-end**: the response's end − the request's arrival; TetriInfer's job completion time (5.1).
- **queue time**: a phase's start − its entry; Vidur's scheduling delay, per phase (5).
- **attainment**: share of requests that meet every objective; a failed request meets none (DistServe 1, 6.1).
- **goodput**: requests a second that meet every objective (in DistServe 1 the highest rate whose attainment
  reaches the goal, 90 % there).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

ATTAINMENT_GOAL = 0.9
"""DistServe judges a rate as served when 90 % of its requests meet their objectives (section 6.1)."""

REPORTED_PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def ttft_s(arrival_s: float, first_token_s: float) -> float:
    """Time to first token."""
    return first_token_s - arrival_s


def tpot_s(first_token_s: float, last_token_s: float, output_tokens: int) -> float | None:
    """Time per output token after the first; None where there is no second token to time."""
    if output_tokens < 2:
        return None
    return (last_token_s - first_token_s) / (output_tokens - 1)


def token_gaps_s(token_times_s: Sequence[float]) -> list[float]:
    """Times between tokens (TBT) of one request: one value fewer than tokens."""
    return [later - earlier for earlier, later in pairwise(token_times_s)]


def end_to_end_s(arrival_s: float, finished_s: float) -> float:
    """From arrival to the last byte of the response; TetriInfer's job completion time."""
    return finished_s - arrival_s


def normalized_latency_s(arrival_s: float, finished_s: float, output_tokens: int) -> float | None:
    """End-to-end time per output token, by which Vidur (7.2) compares; None without tokens."""
    if output_tokens < 1:
        return None
    return (finished_s - arrival_s) / output_tokens


def resource_time_s(busy_s: Iterable[float]) -> float:
    """Wall time summed over the instances that a workload used: TetriInfer's cost (5.1).

    One second on a prefill instance and two on a decode instance are three; a coupled server counts once.
    """
    return math.fsum(busy_s)


def percentiles(values: Iterable[float], ranks: Sequence[float] = REPORTED_PERCENTILES) -> list[float]:
    """The values at ``ranks`` (0..100), linear between the two closest observations; empty for no values."""
    for rank in ranks:
        if not 0.0 <= rank <= 100.0:
            raise ValueError(f"percentile = {rank}: must be within 0..100")
    ordered = sorted(values)
    if not ordered:
        return []
    return [_at_rank(ordered, rank) for rank in ranks]


def _at_rank(ordered: Sequence[float], rank: float) -> float:
    position = rank / 100.0 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    step = ordered[above] - ordered[below]
    return min(ordered[below] + step * (position - below), ordered[above])


@dataclass(frozen=True, slots=True)
class Distribution:
    """How one measure spread over requests (or, for TBT, over gaps)."""

    count: int
    mean_s: float
    minimum_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    maximum_s: float


def describe(values: Iterable[float]) -> Distribution | None:
    """None where there is nothing to describe: an empty measure has no percentile, not a zero one."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50_s, p90_s, p95_s, p99_s = (_at_rank(ordered, rank) for rank in REPORTED_PERCENTILES)
    return Distribution(
        count=len(ordered),
        mean_s=math.fsum(ordered) / len(ordered),
        minimum_s=ordered[0],
        p50_s=p50_s,
        p90_s=p90_s,
        p95_s=p95_s,
        p99_s=p99_s,
        maximum_s=ordered[-1],
    )


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """The times of one request that was served whole. ``tpot_s`` and ``slowest_gap_s`` need two tokens."""

    ttft_s: float
    tpot_s: float | None
    slowest_gap_s: float | None
    end_to_end_s: float


def request_latency(
    arrival_s: float, token_times_s: Sequence[float], finished_s: float, output_tokens: int
) -> RequestLatency:
    """Measure one request from its tokens' arrival times.

    ``output_tokens`` is the server's own count: a server may put several tokens into one event, and TPOT
    divides by tokens. ValueError where no token came.
    """
    if not token_times_s:
        raise ValueError("a request without tokens has no latency: count it as failed")
    return RequestLatency(
        ttft_s=ttft_s(arrival_s, token_times_s[0]),
        tpot_s=tpot_s(token_times_s[0], token_times_s[-1], output_tokens),
        slowest_gap_s=max(token_gaps_s(token_times_s), default=None),
        end_to_end_s=end_to_end_s(arrival_s, finished_s),
    )


@dataclass(frozen=True, slots=True)
class ServiceObjectives:
    """Service level objectives of one request, in seconds; None asks nothing. ``tbt_s`` bounds every gap."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None
    end_to_end_s: float | None = None


def is_within(measured_s: float | None, objective_s: float | None) -> bool:
    """Whether one objective is met. What cannot be measured (one token has no gap) breaks nothing."""
    return objective_s is None or measured_s is None or measured_s <= objective_s


def has_met(latency: RequestLatency, objectives: ServiceObjectives) -> bool:
    """Whether a request met all of its objectives."""
    return (
        is_within(latency.ttft_s, objectives.ttft_s)
        and is_within(latency.tpot_s, objectives.tpot_s)
        and is_within(latency.slowest_gap_s, objectives.tbt_s)
        and is_within(latency.end_to_end_s, objectives.end_to_end_s)
    )


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares (0..1) of all requests that met all objectives, and each by itself (DistServe 6.2 draws these).

    ``requests`` counts the failed ones too: a rejected request is not an attained one.
    """

    requests: int
    met: int
    share: float
    ttft_share: float
    tpot_share: float
    tbt_share: float
    end_to_end_share: float


def slo_attainment(
    latencies: Sequence[RequestLatency], failed: int, objectives: ServiceObjectives
) -> Attainment | None:
    """Attainment over ``latencies`` and ``failed`` further requests; None without any request."""
    requests = len(latencies) + failed
    if requests == 0:
        return None
    met = sum(has_met(latency, objectives) for latency in latencies)
    return Attainment(
        requests=requests,
        met=met,
        share=met / requests,
        ttft_share=sum(is_within(one.ttft_s, objectives.ttft_s) for one in latencies) / requests,
        tpot_share=sum(is_within(one.tpot_s, objectives.tpot_s) for one in latencies) / requests,
        tbt_share=sum(is_within(one.slowest_gap_s, objectives.tbt_s) for one in latencies) / requests,
        end_to_end_share=sum(is_within(one.end_to_end_s, objectives.end_to_end_s) for one in latencies)
        / requests,
    )


def goodput_per_s(met: int, elapsed_s: float) -> float:
    """Requests a second that met their objectives. ValueError for a span that is not positive."""
    if not elapsed_s > 0.0:
        raise ValueError(f"elapsed_s = {elapsed_s}: must be positive")
    return met / elapsed_s


@dataclass(frozen=True, slots=True)
class LatencyMetric:
    """One exported histogram. ``bounds_s`` are Prometheus upper bounds; +Inf is implied."""

    name: str
    documentation: str
    bounds_s: tuple[float, ...]


# A first token takes from a millisecond (a short prompt on an idle device) to minutes (a full queue).
REQUEST_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
# A token takes tens of milliseconds and objectives are set there: finer, or a percentile is a whole bucket.
TOKEN_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# Waiting starts at nothing: a queue that is empty should not read as 1 ms.
QUEUE_BOUNDS_S = (0.0001, 0.0005, *REQUEST_BOUNDS_S)

TTFT = LatencyMetric(
    "lamella_time_to_first_token_seconds", "From a request's arrival to its first token.", REQUEST_BOUNDS_S
)
TPOT = LatencyMetric(
    "lamella_time_per_output_token_seconds",
    "Mean time per output token after the first, one observation a request.",
    TOKEN_BOUNDS_S,
)
TBT = LatencyMetric(
    "lamella_time_between_tokens_seconds", "Every gap between two tokens of a request.", TOKEN_BOUNDS_S
)
END_TO_END = LatencyMetric(
    "lamella_end_to_end_seconds", "From a request's arrival to the end of its response.", REQUEST_BOUNDS_S
)
QUEUE_TIME = LatencyMetric(
    "lamella_queue_time_seconds",
    "How long a request waited in a phase (label `phase`: placement, prefill, handover, decode).",
    QUEUE_BOUNDS_S,
)
PREFILL_TIME = LatencyMetric(
    "lamella_prefill_compute_seconds", "From a prompt's first chunk to its first token.", REQUEST_BOUNDS_S
)
DECODE_TIME = LatencyMetric(
    "lamella_decode_time_seconds", "From a request's first token to its last.", REQUEST_BOUNDS_S
)
TRANSFER_TIME = LatencyMetric(
    "lamella_kv_transfer_seconds", "From the order to send a sequence's KV to its receipt.", QUEUE_BOUNDS_S
)
