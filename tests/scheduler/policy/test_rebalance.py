"""Which sequence moves to which attention worker: worked examples, and what must hold for any workers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.rebalance import (
    MIN_GAIN_SHARE,
    Move,
    PoolLoad,
    Resident,
    can_pay,
    choose_balancing,
    choose_departure,
)

BLOCK_SIZE = 16
MAX_STEPS = 10_000


def resident(pool: int, tokens: int, *, max_steps: int = MAX_STEPS, longest_blocks: int = 1) -> Resident:
    return Resident(pool, tokens, -(-tokens // BLOCK_SIZE), longest_blocks, max_steps)


def loads_of(
    residents: list[Resident], pools: int, total_blocks: int = 1000, closed: tuple[int, ...] = ()
) -> dict[int, PoolLoad]:
    loads = {}
    for pool in range(pools):
        here = [each for each in residents if each.pool == pool]
        free = total_blocks - sum(each.blocks for each in here)
        tokens = sum(each.context_tokens for each in here)
        loads[pool] = PoolLoad(tokens, len(here), free, total_blocks, pool not in closed)
    return loads


def balancing(
    residents: list[Resident], pools: int = 2, gain: int = 1, total_blocks: int = 1000
) -> Move | None:
    return choose_balancing(loads_of(residents, pools, total_blocks), residents, gain)


def test_the_sequence_whose_move_evens_out_most_goes_where_least_is() -> None:
    residents = [resident(0, 900), resident(0, 500), resident(0, 200), resident(1, 400), resident(2, 700)]
    assert balancing(residents, pools=3) == Move(1, 1)


def test_what_evens_out_less_than_a_fifth_or_than_the_tokens_asked_for_stays() -> None:
    # 1,000 beside 600: the most shrinks to 800 at best, by a fifth.
    even = [resident(0, 200), resident(0, 800), resident(1, 600)]
    assert balancing(even) == Move(0, 1)
    assert balancing([*even, resident(1, 1)]) is None
    assert balancing(even, gain=200) == Move(0, 1)
    assert balancing(even, gain=201) is None


def test_where_contexts_are_alike_no_look_at_the_residents_is_needed() -> None:
    apart = [resident(0, 1000), resident(1, 600)]
    assert can_pay(loads_of(apart, 2), 200)
    assert not can_pay(loads_of(apart, 2), 201)
    assert not can_pay(loads_of([*apart, resident(1, 1)], 2), 1)
    assert can_pay(loads_of(apart, 2, closed=(1,)), 201)


def test_a_single_long_sequence_stays_as_its_move_would_only_exchange_the_workers() -> None:
    assert balancing([resident(0, 900), resident(1, 100)]) is None


@pytest.mark.parametrize(("max_steps", "moves"), [(63, False), (64, True)])
def test_a_sequence_that_ends_before_its_move_has_paid_stays(max_steps: int, moves: bool) -> None:
    # 600 tokens move so that 300 less are read a step: twice 32 steps pay for it.
    residents = [resident(0, 600, max_steps=max_steps), resident(0, 600, max_steps=0), resident(1, 300)]
    assert balancing(residents) == (Move(0, 1) if moves else None)


def test_nothing_moves_without_room_for_it_its_growth_and_that_of_the_others() -> None:
    residents = [resident(0, 160), resident(0, 160)]
    assert balancing(residents, total_blocks=20) is not None
    full = {**loads_of(residents, 1), 1: PoolLoad(0, 0, 9, 1000, is_open=True)}
    assert choose_balancing(full, residents, 1) is None
    growing = {**loads_of(residents, 1), 1: PoolLoad(16, 1, 10, 1000, is_open=True)}
    assert choose_balancing(growing, residents, 1) is None
    long = [resident(0, 160, longest_blocks=30) for _ in range(2)]
    assert balancing(long, total_blocks=29) is None
    assert balancing(long, total_blocks=30) is not None


def test_a_worker_that_drains_gives_its_longest_first_whatever_that_evens_out() -> None:
    residents = [resident(0, 16, max_steps=1), resident(0, 320, max_steps=1), resident(1, 900)]
    assert choose_departure(loads_of(residents, 2, closed=(0,)), residents) == Move(1, 1)
    # Without room for the longest the next one goes.
    residents.append(resident(1, 700))
    loads = loads_of(residents, 2, total_blocks=110, closed=(0,))
    assert choose_departure(loads, residents) == Move(0, 1)
    assert choose_departure(loads_of(residents, 2), residents) is None
    assert choose_departure(loads_of(residents, 2, closed=(0, 1)), residents) is None


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2000)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(60, 400),
)
def test_moves_never_raise_the_most_context_and_come_to_an_end(
    sequences: list[tuple[int, int]], pools: int, gain: int, total_blocks: int
) -> None:
    residents: list[Resident] = []
    for pool, tokens in sequences:
        new = resident(pool % pools, tokens)
        if loads_of([*residents, new], pools, total_blocks)[new.pool].free_blocks >= 0:
            residents.append(new)
    for _ in range(200):
        loads = loads_of(residents, pools, total_blocks)
        move = choose_balancing(loads, residents, gain)
        if move is None:
            return
        assert can_pay(loads, gain)
        moved = residents[move.resident]
        residents[move.resident] = resident(move.pool, moved.context_tokens)
        after = loads_of(residents, pools, total_blocks)
        most = max(load.context_tokens for load in loads.values())
        assert loads[moved.pool].context_tokens == most
        larger = max(after[pool].context_tokens for pool in (moved.pool, move.pool))
        assert larger <= most - max(gain, MIN_GAIN_SHARE * most)
        assert after[move.pool].free_blocks >= 0
    pytest.fail("moves go on and on")


@given(st.integers(0, 1 << 32))
def test_a_worker_that_drains_is_empty_in_the_end_if_the_others_have_room(seed: int) -> None:
    chance = random.Random(seed)
    pools = chance.randint(2, 4)
    residents = [resident(chance.randrange(pools), chance.randint(1, 500)) for _ in range(20)]
    for _ in range(20):
        loads = loads_of(residents, pools, total_blocks=20 * 33 + 20, closed=(0,))
        move = choose_departure(loads, residents)
        if move is None:
            break
        residents[move.resident] = resident(move.pool, residents[move.resident].context_tokens)
    assert all(each.pool != 0 for each in residents)
