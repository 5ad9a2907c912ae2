"""Who is taken into a decode batch: each rule on the case it was made for, and what must hold of all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import DecodeAdmission
from scheduler.policy.decode_admission import ADMISSIONS, Growing, Pool, can_admit

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
