"""Batches of whole prompts near the length that saturates the device (DistServe 4.3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.prefill_batching import (
    fill_batch_of,
    fill_chunk,
    fill_saturated,
    fill_saturated_with_borders,
)

PROMPTS = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("remaining_tokens", "batch"),
    [
        ([], []),
        ([30], [30]),
        ([30, 40, 20, 50], [30, 40, 20]),  # 90 is nearer to 100 than 140
        ([30, 40, 45], [30, 40, 45]),  # and 115 than 70
        ([60, 40, 1], [60, 40]),
        ([10, 100, 10], [10]),  # one that saturates is alone, behind another
        ([100, 10], [100]),  # or before it
        ([250, 10], [250]),  # and whole
    ],
)
def test_short_prompts_are_computed_together_and_a_long_one_alone(
    remaining_tokens: list[int], batch: list[int]
) -> None:
    assert fill_saturated(remaining_tokens, 100) == batch


def test_where_others_may_pass_at_borders_a_long_prompt_has_borders() -> None:
    assert fill_saturated_with_borders([250, 10], 100) == [100]
    # What is left of it is a short prompt.
    assert fill_saturated_with_borders([50, 10], 100) == [50, 10]


def test_only_by_what_is_left_of_them_prompts_are_interrupted() -> None:
    assert fill_batch_of("saturation", "srpt") is fill_saturated_with_borders
    assert fill_batch_of("saturation", "sjf") is fill_saturated
    assert fill_batch_of("chunks", "srpt") is fill_chunk


@given(PROMPTS, st.integers(1, 200))
def test_everybody_is_computed_in_order_in_batches_near_saturation(
    prompt_tokens: list[int], saturation_tokens: int
) -> None:
    """Nobody starves, nobody is passed, and no batch could be nearer by its last or the next prompt."""
    left = prompt_tokens
    while left:
        batch = fill_saturated(left, saturation_tokens)
        assert batch
        assert batch == left[: len(batch)], "whole prompts, the first of them"
        if len(batch) > 1:
            assert max(batch) < saturation_tokens
            before = sum(batch[:-1])
            assert before < saturation_tokens
            assert abs(sum(batch) - saturation_tokens) <= saturation_tokens - before
        left = left[len(batch) :]
        if left and max(batch[0], left[0]) < saturation_tokens:
            missed = abs(saturation_tokens - sum(batch))
            assert abs(sum(batch) + left[0] - saturation_tokens) >= missed, "the next one would have fitted"


@given(PROMPTS, st.integers(1, 200))
def test_with_borders_every_batch_gets_on_and_nothing_is_computed_twice(
    prompt_tokens: list[int], saturation_tokens: int
) -> None:
    left, computed = list(prompt_tokens), 0
    while left:
        batch = fill_saturated_with_borders(left, saturation_tokens)
        assert batch
        assert min(batch) > 0
        assert max(batch) <= saturation_tokens
        computed += sum(batch)
        left = [
            tokens - done
            for tokens, done in zip(left, batch + [0] * (len(left) - len(batch)), strict=True)
            if tokens > done
        ]
    assert computed == sum(prompt_tokens)
