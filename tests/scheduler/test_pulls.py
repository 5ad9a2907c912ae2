"""When KV is handed over layer by layer, and how much of it a decode step leaves time for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.hand_over import is_layerwise, layers_per_report
from scheduler.policy.pull_budget import (
    GENTLE_SHARE,
    IDLE_PORTIONS_S,
    UNMEASURED_IDLE_BYTES,
    PullBudget,
    share_of_steps,
)


def bytes_allowed(budget: PullBudget, lanes: int = 1, pulls: int = 0, decoding: int = 1) -> int:
    return budget.portion_bytes(budget.allowed_s(lanes, pulls, decoding))


def test_long_prompts_that_are_decoded_are_handed_over_while_they_are_computed() -> None:
    assert is_layerwise(prompt_tokens=512, output_tokens=2, min_tokens=512)
    assert not is_layerwise(prompt_tokens=511, output_tokens=2, min_tokens=512)
    assert not is_layerwise(prompt_tokens=4096, output_tokens=1, min_tokens=512)


@pytest.mark.parametrize(("layer_bytes", "layers"), [(1, 2 << 20), (400_000, 6), (2 << 20, 1), (1 << 30, 1)])
def test_layers_are_told_of_when_their_kv_is_worth_it(layer_bytes: int, layers: int) -> None:
    assert layers_per_report(layer_bytes) == layers


def test_without_measurements_the_least_portion_is_pulled() -> None:
    budget = PullBudget(share=0.5, least_bytes=1000)
    assert bytes_allowed(budget) == 1000
    budget.step_ended(0.02)
    budget.portion_done(0, 0.1)
    assert bytes_allowed(budget) == 1000


def test_while_no_step_runs_the_pulls_together_are_in_the_air_for_some_tens_of_milliseconds() -> None:
    budget = PullBudget(least_bytes=1000)
    assert budget.idle_portion_bytes(1) == UNMEASURED_IDLE_BYTES
    budget.portion_done(1 << 20, 0.01)
    together = int(IDLE_PORTIONS_S * (1 << 20) / 0.01)
    for pulls in (1, 2, 7):
        assert budget.idle_portion_bytes(pulls) == together // pulls
    assert budget.idle_portion_bytes(1 << 20) == 1000
    assert budget.idle_portion_bytes(1) > bytes_allowed(budget)


def test_a_first_portion_that_had_to_open_its_link_does_not_keep_the_next_ones_small() -> None:
    budget = PullBudget()
    budget.portion_done(UNMEASURED_IDLE_BYTES, 0.5)
    assert budget.idle_portion_bytes(1) == budget.least_bytes
    budget.portion_done(budget.least_bytes, 0.0005)
    assert budget.idle_portion_bytes(1) > 50 * budget.least_bytes


@given(
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-5, 1.0)), min_size=1),
    st.lists(st.floats(1e-4, 1.0), min_size=1),
)
def test_a_portion_takes_no_more_than_its_share_of_a_step(
    share: float, portions: list[tuple[int, float]], steps: list[float]
) -> None:
    """At a rate, and in a step, that are within what was measured; and never less than the least."""
    budget = PullBudget(share=share, least_bytes=100)
    for kv_bytes, transfer_s in portions:
        budget.portion_done(kv_bytes, transfer_s)
    for step_s in steps:
        budget.step_ended(step_s)
    rates = [kv_bytes / transfer_s for kv_bytes, transfer_s in portions]
    least, most = share * min(steps) * min(rates), share * max(steps) * max(rates)
    assert max(100, int(least * 0.999)) <= bytes_allowed(budget) <= max(100, most * 1.001)


def test_a_share_of_a_steady_step_at_a_steady_rate() -> None:
    budget = PullBudget(share=0.2, least_bytes=1)
    for _ in range(3):
        budget.step_ended(0.05)
        budget.portion_done(1 << 20, 0.01)
    assert bytes_allowed(budget) == 1 << 20
    assert bytes_allowed(budget, lanes=4) == 1 << 18


@pytest.mark.parametrize(
    ("pulls", "decoding", "share"), [(0, 5, 0.2), (1, 5, 0.2), (1, 4, 0.2), (1, 3, 0.25), (30, 10, 0.75)]
)
def test_where_more_wait_for_kv_than_the_share_of_all_theirs_is_the_share(
    pulls: int, decoding: int, share: float
) -> None:
    budget = PullBudget(share=0.2, least_bytes=1)
    budget.step_ended(0.05)
    budget.portion_done(1 << 20, 0.01)
    portion_s = bytes_allowed(budget, 1, pulls, decoding) * 0.01 / (1 << 20)
    assert portion_s == pytest.approx(share * 0.05, rel=1e-5)


def test_what_takes_nothing_of_what_steps_need_may_take_all_of_their_time() -> None:
    assert share_of_steps(None, is_shared=True) == GENTLE_SHARE
    assert share_of_steps(None, is_shared=False) == 1.0
    assert [share_of_steps(0.05, is_shared=each) for each in (True, False)] == [0.05, 0.05]


def test_what_a_portion_leaves_of_its_time_is_enough_for_one_as_they_are_or_for_the_least() -> None:
    """The least portion would take 256 steps at the rate of short prompts', which is latency's."""
    short = PullBudget(share=0.2)
    short.step_ended(0.03)
    short.portion_done(32, 0.001)
    assert [short.has_room(left_s) for left_s in (0.0, 0.0009, 0.0011, 0.006)] == [False, False, True, True]
    long = PullBudget(share=0.2)
    long.step_ended(0.03)
    long.portion_done(3_000_000, 0.006)
    least_s = long.least_bytes * 0.006 / 3_000_000
    assert [long.has_room(left_s) for left_s in (0.0, 0.9 * least_s, 1.1 * least_s)] == [False, False, True]
