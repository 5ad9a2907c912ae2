"""The pure decisions: worked examples and what must hold for any input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.performance import FittedTime
from scheduler.policy.admission import MAX_RETRY_S, MIN_RETRY_S, next_end_s, prefill_s, retry_after_s
from scheduler.policy.decode_batching import choose_victims
from scheduler.policy.prefill_batching import PROMPT_ORDERS, fill_chunk, order_window

LENGTHS = st.lists(st.integers(1, 500), max_size=20)


@given(LENGTHS, st.integers(1, 512))
def test_a_chunk_is_full_unless_the_prompts_run_out(prompts: list[int], chunk_tokens: int) -> None:
    slices = fill_chunk(prompts, chunk_tokens)
    assert sum(slices) == min(chunk_tokens, sum(prompts))
    assert all(taken > 0 for taken in slices)
    assert slices[:-1] == prompts[: len(slices) - 1 if slices else 0]


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("sjf", [2, 0, 3, 1]), ("ljf", [1, 0, 3, 2])]
)
def test_equal_prompts_stay_in_arrival_order(order: str, expected: list[int]) -> None:
    assert order_window([5, 9, 2, 5], order) == expected  # type: ignore[arg-type]  # a key of PROMPT_ORDERS


@given(LENGTHS, st.sampled_from(sorted(PROMPT_ORDERS)))
def test_an_order_is_a_permutation(prompts: list[int], order: str) -> None:
    indices = order_window(prompts, order)  # type: ignore[arg-type]  # a key of PROMPT_ORDERS
    assert sorted(indices) == list(range(len(prompts)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_victims_are_the_latest_and_never_the_oldest(held: list[int], needed: int) -> None:
    victims = choose_victims(held, needed)
    assert victims == list(range(len(held) - 1, len(held) - 1 - len(victims), -1))
    assert 0 not in victims
    freed = sum(held[index] for index in victims)
    assert freed >= needed or len(victims) == len(held) - 1
    if victims:
        assert freed - held[victims[-1]] < needed, "one more than needed was given up"


@given(st.one_of(st.none(), st.floats(-1e6, 1e6)))
def test_retry_times_are_bounded(excess_s: float | None) -> None:
    assert MIN_RETRY_S <= retry_after_s(excess_s) <= MAX_RETRY_S


def test_the_first_of_sequences_that_began_at_different_times_is_expected_to_end() -> None:
    """Alone it draws what it lacks; of 9 that lack 100 on average one lacks 20."""
    step_time = FittedTime((0.2, 0.01, 0.01), 0.0, 100)
    assert next_end_s(9, 1000, 900.0, step_time) == pytest.approx(20 * 0.3)
    assert next_end_s(1, 0, 50.0, step_time) == pytest.approx(50 * 0.02)
    assert next_end_s(9, 1000, 900.0, None) is None
    assert next_end_s(0, 0, 0.0, step_time) is None


def test_a_queue_takes_as_long_as_its_instance_has_learned_or_else_as_its_rate_says() -> None:
    """1,000 tokens are two chunks of 512, or four of 256."""
    learned = FittedTime((2.0, 5.0, 0.1), 0.0, 100)
    assert prefill_s(1000, learned, 512, 1e6) == pytest.approx(2.2)
    assert prefill_s(1000, learned, 256, 1e6) == pytest.approx(2.4)
    assert prefill_s(1000, None, 512, 500.0) == 2.0
    assert prefill_s(1000, None, 512, None) is None
    assert prefill_s(0, learned, 512, None) == 0
