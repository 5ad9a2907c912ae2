"""Who is taken into a decode batch: each rule on the case it was made for, and what must hold of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import DecodeAdmission
from scheduler.policy.decode_admission import ADMISSIONS, Growing, Pool, can_admit, peak_blocks

growing = st.builds(Growing, st.integers(1, 200), st.integers(1, 200))


def test_greedy_keeps_a_block_for_every_sequence_that_is_there() -> None:
    present = [Growing(4, 100), Growing(4, 100)]
    assert can_admit("greedy", Pool(5, 4), Growing(12, 100), present)
    assert not can_admit("greedy", Pool(4, 4), Growing(12, 100), present)


def test_reserve_static_wants_the_newcomers_whole_kv_free_now() -> None:
    present = [Growing(4, 2)]
    assert can_admit("reserve_static", Pool(10, 4), Growing(20, 20), present)
    assert not can_admit("reserve_static", Pool(9, 4), Growing(20, 20), present)


def test_reserve_dynamic_looks_at_the_moment_when_the_first_one_ends() -> None:
    """In 4 steps the present one ends; until then it and the newcomer grow by one block each."""
    present = [Growing(8, 4)]
    assert can_admit("reserve_dynamic", Pool(7, 4), Growing(20, 400), present)
    assert not can_admit("reserve_dynamic", Pool(6, 4), Growing(20, 400), present)
    assert not can_admit("reserve_static", Pool(7, 4), Growing(20, 400), present)


def test_reserve_peak_looks_at_every_end() -> None:
    """Token by token: at the newcomer's end, in 2 steps, they hold 12 + 6; at the other's, in 10, 20."""
    present = [Growing(10, 10)]
    assert can_admit("reserve_peak", Pool(10, 1), Growing(4, 2), present)
    assert not can_admit("reserve_peak", Pool(9, 1), Growing(4, 2), present)
    assert can_admit("reserve_dynamic", Pool(9, 1), Growing(4, 2), present)


@given(st.lists(growing, min_size=1, max_size=12))
def test_of_single_tokens_the_peak_is_the_sum_of_those_that_are_there_times_what_they_draw(
    everybody: list[Growing],
) -> None:
    """LightLLM's rule: of those with most still to come, their tokens and as many more for each."""
    longest_first = sorted(everybody, key=lambda each: -each.coming_tokens)
    needs = [
        sum(each.tokens for each in longest_first[: index + 1]) + (index + 1) * last.coming_tokens
        for index, last in enumerate(longest_first)
    ]
    assert peak_blocks(everybody, 1) == max(needs)


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
def test_whoever_would_be_alone_is_taken_if_it_fits(admission: DecodeAdmission) -> None:
    assert can_admit(admission, Pool(3, 4), Growing(12, 4000), [])
    assert not can_admit(admission, Pool(2, 4), Growing(12, 4000), [])


@given(growing, st.lists(growing, max_size=6), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_nobody_is_taken_whose_next_token_would_find_no_block(
    newcomer: Growing, present: list[Growing], free: int, block_size: int
) -> None:
    pool = Pool(free, block_size)
    for admission in ADMISSIONS:
        if can_admit(admission, pool, newcomer, present) and present:
            growth = sum(each.blocks(1, block_size) - each.blocks(0, block_size) for each in present)
            assert newcomer.blocks(0, block_size) + growth <= free
    if can_admit("reserve_static", pool, newcomer, present):
        assert can_admit("greedy", pool, newcomer, present)


@given(growing, st.lists(growing, min_size=1, max_size=6), st.integers(0, 200))
def test_reserve_dynamic_never_preempts_before_the_first_one_ends(
    newcomer: Growing, present: list[Growing], free: int
) -> None:
    """If lengths are as expected: stepped out, token by token."""
    if not can_admit("reserve_dynamic", Pool(free, 4), newcomer, present):
        return
    everybody = [newcomer, *present]
    held = sum(each.blocks(0, 4) for each in present)
    for step in range(min(each.coming_tokens for each in everybody) + 1):
        assert sum(each.blocks(step, 4) for each in everybody) <= free + held


@given(growing, st.lists(growing, min_size=1, max_size=6), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_reserve_peak_takes_just_those_with_whom_nobody_will_be_preempted(
    newcomer: Growing, present: list[Growing], free: int, block_size: int
) -> None:
    """If lengths are as expected: stepped out, token by token, until all have ended."""
    everybody = [newcomer, *present]
    held = sum(each.blocks(0, block_size) for each in present)
    most = max(
        sum(each.blocks(step, block_size) for each in everybody if each.coming_tokens >= step)
        for step in range(max(each.coming_tokens for each in everybody) + 1)
    )
    keeps_a_block_each = newcomer.blocks(0, block_size) + len(present) <= free
    is_taken = can_admit("reserve_peak", Pool(free, block_size), newcomer, present)
    assert is_taken == (most <= free + held and keeps_a_block_each)
