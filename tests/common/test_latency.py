"""Latency definitions, by worked examples and by properties."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import latency
from common.latency import LatencyMetric, RequestLatency, ServiceObjectives

TIMES = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=60).map(sorted)


def test_one_request_worked_by_hand() -> None:
    # Arrives at 10.0, tokens at 10.2, 10.25, 10.45, 10.5; the stream closes at 10.6.
    measured = latency.request_latency(10.0, [10.2, 10.25, 10.45, 10.5], 10.6, output_tokens=4)
    assert measured.ttft_s == pytest.approx(0.2)
    assert measured.tpot_s == pytest.approx(0.1)
    assert measured.slowest_gap_s == pytest.approx(0.2)
    assert measured.end_to_end_s == pytest.approx(0.6)
    assert latency.token_gaps_s([10.2, 10.25, 10.45, 10.5]) == pytest.approx([0.05, 0.2, 0.05])
    assert latency.normalized_latency_s(10.0, 10.6, 4) == pytest.approx(0.15)


def test_a_single_token_has_a_ttft_but_no_time_per_token() -> None:
    measured = latency.request_latency(0.0, [0.5], 0.5, output_tokens=1)
    assert measured == RequestLatency(ttft_s=0.5, tpot_s=None, slowest_gap_s=None, end_to_end_s=0.5)
    assert latency.normalized_latency_s(0.0, 0.5, 0) is None


def test_no_token_is_no_latency() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        latency.request_latency(0.0, [], 1.0, output_tokens=0)


def test_tpot_divides_by_tokens_where_events_carry_several() -> None:
    # Two events, nine tokens: eight tokens after the first in 0.8 s.
    measured = latency.request_latency(0.0, [0.1, 0.9], 0.9, output_tokens=9)
    assert measured.tpot_s == pytest.approx(0.1)


def test_resource_time_adds_up_what_every_instance_was_used() -> None:
    assert latency.resource_time_s([1.0, 2.0]) == 3.0


def test_attainment_counts_failures_as_misses() -> None:
    objectives = ServiceObjectives(ttft_s=0.2, tpot_s=0.1)
    fast = RequestLatency(0.1, 0.05, 0.06, 1.0)
    slow_start = RequestLatency(0.3, 0.05, 0.06, 1.0)
    slow_tokens = RequestLatency(0.1, 0.2, 0.5, 1.0)
    found = latency.slo_attainment([fast, slow_start, slow_tokens], failed=1, objectives=objectives)
    assert found is not None
    assert (found.requests, found.met, found.share) == (4, 1, 0.25)
    assert (found.ttft_share, found.tpot_share) == (0.5, 0.5)
    assert found.tbt_share == 0.75
    assert latency.goodput_per_s(found.met, 2.0) == 0.5


def test_nothing_offered_has_no_attainment() -> None:
    assert latency.slo_attainment([], failed=0, objectives=ServiceObjectives()) is None


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, math.nan])
def test_goodput_needs_a_span_of_time(elapsed_s: float) -> None:
    with pytest.raises(ValueError, match="elapsed_s"):
        latency.goodput_per_s(1, elapsed_s)


def test_percentiles_by_hand() -> None:
    assert latency.percentiles([4.0, 1.0, 3.0, 2.0], [0.0, 50.0, 100.0]) == [1.0, 2.5, 4.0]
    assert latency.percentiles([]) == []
    assert latency.describe([]) is None
    with pytest.raises(ValueError, match="101"):
        latency.percentiles([1.0], [101.0])


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.lists(st.floats(0.0, 100.0), min_size=1, max_size=5))
def test_percentiles_agree_with_numpy(values: list[float], ranks: list[float]) -> None:
    expected = np.percentile(np.asarray(values), ranks)
    assert latency.percentiles(values, ranks) == pytest.approx(list(expected), rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(0.0, 1e6), min_size=1))
def test_a_description_is_ordered(values: list[float]) -> None:
    found = latency.describe(values)
    assert found is not None
    assert found.count == len(values)
    ordered = [found.minimum_s, found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.maximum_s]
    assert all(lower <= upper for lower, upper in pairwise(ordered))
    assert found.minimum_s <= found.mean_s * (1 + 1e-12)
    assert found.mean_s <= found.maximum_s * (1 + 1e-12)


@given(TIMES)
def test_gaps_add_up_to_the_time_from_first_to_last_token(times_s: list[float]) -> None:
    gaps_s = latency.token_gaps_s(times_s)
    assert len(gaps_s) == len(times_s) - 1
    assert all(gap_s >= 0 for gap_s in gaps_s)
    per_token_s = latency.tpot_s(times_s[0], times_s[-1], len(times_s))
    if per_token_s is not None:
        assert per_token_s * len(gaps_s) == pytest.approx(math.fsum(gaps_s), abs=1e-6)
        assert per_token_s <= max(gaps_s) * (1 + 1e-9) + 1e-12


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=30), st.integers(0, 5), st.floats(0, 10)
)
def test_looser_objectives_are_never_met_less_often(
    measured: list[tuple[float, float]], failed: int, bound_s: float
) -> None:
    latencies = [RequestLatency(first_s, per_token_s, per_token_s, 20.0) for first_s, per_token_s in measured]
    tight = latency.slo_attainment(latencies, failed, ServiceObjectives(ttft_s=bound_s, tpot_s=bound_s / 10))
    loose = latency.slo_attainment(latencies, failed, ServiceObjectives(ttft_s=bound_s))
    if tight is None or loose is None:
        assert not latencies
        assert failed == 0
        return
    assert tight.share <= min(tight.ttft_share, tight.tpot_share)
    assert tight.share <= loose.share <= 1.0


def test_exported_histograms_are_distinct_and_rising() -> None:
    metrics = [each for each in vars(latency).values() if isinstance(each, LatencyMetric)]
    assert metrics
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.name.startswith("lamella_")
        assert metric.name.endswith("_seconds")
        assert all(lower < upper for lower, upper in pairwise((0.0, *metric.bounds_s)))
