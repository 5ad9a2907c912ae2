"""How many workers a workload needs: papers' worked cases, and what must hold for any."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.performance import FittedTime
from scheduler.policy.worker_counts import (
    Bounds,
    Chunks,
    Steps,
    attention_need,
    chunks_of,
    decode_need,
    gateway_need,
    mean_fit,
    mixed_need,
    prefill_need,
    steps_of,
    waiting_share,
)
from scheduler.policy.workload import Moments, Workload

BOUNDS = Bounds(
    ttft_s=2.0,
    tpot_s=0.1,
    utilisation=0.7,
    chunk_tokens=512,
    max_decode_batch=64,
    capacity_tokens=100_000.0,
)
STEPS = Steps(base_s=0.02, per_sequence_s=0.001, context_tokens=800.0)
RATES = st.floats(0.01, 200.0)


def lengths(*values: int) -> Moments:
    found = Moments()
    for value in values:
        found.add(value)
    return found


def workload(rate_per_s: float, arrival_variation: float = 1.0) -> Workload:
    return Workload(
        rate_per_s, rate_per_s, arrival_variation, lengths(200, 800, 1000), lengths(50, 150, 400), 1000
    )


def test_a_single_server_waits_as_the_textbook_says() -> None:
    for load in (0.1, 0.5, 0.9):
        assert waiting_share(1, load) == pytest.approx(load), "M/M/1: the share that waits is the load"
    assert waiting_share(2, 1.0) == pytest.approx(1 / 3)
    assert waiting_share(10, 8.0) == pytest.approx(0.409, abs=0.001)


def test_prompts_that_take_a_second_need_a_server_a_piece_and_some_more_against_waiting() -> None:
    chunks = Chunks(seconds=1.0, variation=1.0)
    needs = [prefill_need(workload(rate), chunks, BOUNDS).workers for rate in (0.0, 0.2, 0.6, 3.0, 30.0)]
    assert needs == [1, 1, 2, 5, 43]
    assert 30 / BOUNDS.utilisation <= needs[-1] <= 30 / BOUNDS.utilisation + 1, "many hardly ever wait"


def test_an_objective_that_no_number_of_workers_can_keep_leaves_utilisation_to_decide() -> None:
    chunks = Chunks(seconds=3.0, variation=1.0)
    assert prefill_need(workload(1.0), chunks, BOUNDS).workers == math.ceil(3 / BOUNDS.utilisation)


def test_decode_needs_as_many_as_keep_its_batch_under_what_the_objective_allows() -> None:
    """A batch of 64 takes 84 ms, within 100. Of 2,000 tokens/s each of three draws 667 with a batch of 40;
    two would need more than they can at any batch."""
    need = decode_need(workload(10.0), STEPS, BOUNDS)
    assert STEPS.most(BOUNDS) == 64
    assert need.workers == 3
    assert 1 / STEPS.per_sequence_s <= 10.0 * 200.0 / 2


def test_memory_bounds_a_batch_that_time_would_not() -> None:
    steps = Steps(base_s=0.005, per_sequence_s=0.0, context_tokens=10_000.0)
    assert steps.most(BOUNDS) == 10
    small = decode_need(workload(20.0), steps, BOUNDS).workers
    assert small > decode_need(workload(20.0), Steps(0.005, 0.0, 100.0), BOUNDS).workers


@given(RATES, RATES, st.floats(0.1, 4.0), st.floats(0.001, 3.0))
def test_more_requests_never_need_fewer_workers(
    one: float, other: float, variation: float, chunk_s: float
) -> None:
    lower, higher = (workload(rate, variation) for rate in sorted((one, other)))
    chunks = Chunks(chunk_s, 0.5)
    needs = [
        (
            prefill_need(load, chunks, BOUNDS),
            decode_need(load, STEPS, BOUNDS),
            mixed_need(load, chunks, STEPS, BOUNDS),
            attention_need(load, STEPS, BOUNDS, 4, 50_000.0),
            gateway_need(load, 10, BOUNDS, 2048),
        )
        for load in (lower, higher)
    ]
    for fewer, more in zip(*needs, strict=True):
        assert 1 <= fewer.workers <= more.workers


@given(RATES)
def test_of_instances_that_do_both_as_many_as_either_half_needs_will_do(rate_per_s: float) -> None:
    load, chunks = workload(rate_per_s), Chunks(0.05, 0.5)
    halves = prefill_need(load, chunks, BOUNDS), decode_need(load, STEPS, BOUNDS)
    assert mixed_need(load, chunks, STEPS, BOUNDS) in halves
    assert mixed_need(load, chunks, STEPS, BOUNDS).workers == max(each.workers for each in halves)


def test_what_instances_have_learned_counts_by_how_much_they_have_seen() -> None:
    fits = [FittedTime((0.001, 0.002, 0.01), 0.1, 300), FittedTime((0.005, 0.002, 0.01), 0.5, 100)]
    mean = mean_fit(fits)
    assert mean is not None
    assert mean.coefficients == pytest.approx((0.002, 0.002, 0.01))
    assert mean.relative_error == pytest.approx(0.2)
    assert mean.samples == 400
    assert mean_fit([]) is None


def test_chunks_and_steps_are_of_the_workloads_own_lengths() -> None:
    load = workload(1.0)
    chunks = chunks_of(load, FittedTime((0.1, 0.5, 0.01), 0.0, 100), 512)
    pairs = (200 * 199 + 800 * 799 + 1000 * 999) / 2 / 3
    seconds = 0.1 * 2 / 3 + 0.5 * pairs / 1e6 + 0.01 * 2000 / 3 / 512
    assert chunks.seconds == pytest.approx(seconds)
    steps = steps_of(load, FittedTime((0.01, 0.002, 0.02), 0.0, 100))
    drawn = (50**2 + 150**2 + 400**2) / 2 / (50 + 150 + 400)
    assert steps.context_tokens == pytest.approx(2000 / 3 + drawn), "long outputs are met more often"
    assert steps.seconds(10) == pytest.approx(0.02 + 10 * (0.002 + 0.01 * steps.context_tokens / 1000))
