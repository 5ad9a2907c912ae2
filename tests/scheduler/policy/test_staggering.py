"""Staggered pipelining, in rotation and fixed: who computes which slice, and when nobody waits."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.staggering import Staggering, staggering_timing

BATCHES = st.integers(2, 9)


def test_the_papers_figure_with_three_batches_on_two_replicas() -> None:
    rotation = Staggering(3)
    assert [[rotation.replica(batch, piece) for piece in range(4)] for batch in range(3)] == [
        [0, 1, 0, 1],
        [1, 0, 1, 0],
        [0, 1, 0, 1],
    ]
    assert [rotation.turn(batch, piece) for piece in range(2) for batch in range(3)] == [*range(6)]


@given(BATCHES, st.integers(1, 40))
def test_a_balanced_rotation_has_no_two_batches_on_a_replica_and_no_replica_idle(
    batches: int, pieces: int
) -> None:
    """Slots are one attention long: the slice of a turn begins in that slot and takes n − 1 of them."""
    rotation = Staggering(batches)
    taken: dict[tuple[int, int], tuple[int, int]] = {}
    for batch in range(batches):
        for piece in range(pieces):
            begin = rotation.turn(batch, piece)
            for slot in range(begin, begin + rotation.replicas):
                place = (rotation.replica(batch, piece), slot)
                assert place not in taken, f"{(batch, piece)} and {taken[place]} want {place}"
                taken[place] = (batch, piece)
    slots = Counter(slot for _, slot in taken)
    whole = range(rotation.replicas - 1, batches * pieces)
    assert all(slots[slot] == rotation.replicas for slot in whole)


@given(BATCHES, st.integers(0, 500))
def test_a_fixed_batch_has_a_replica_to_itself(batches: int, piece: int) -> None:
    fixed = Staggering(batches, is_fixed=True)
    assert fixed.replicas == batches
    assert [fixed.replica(batch, piece) for batch in range(batches)] == [*range(batches)]


@given(BATCHES, st.booleans(), st.integers(-1, 500), st.data())
def test_a_batch_joins_at_its_next_turn(batches: int, is_fixed: bool, turn: int, data: st.DataObject) -> None:
    staggering = Staggering(batches, is_fixed)
    batch = data.draw(st.integers(0, batches - 1))
    piece = staggering.next_piece(batch, turn)
    assert turn < staggering.turn(batch, piece) <= turn + batches


@given(BATCHES, st.floats(1e-6, 1.0))
def test_nobody_waits_where_a_slice_takes_the_attention_of_all_other_batches(
    batches: int, attention_s: float
) -> None:
    timing = staggering_timing(Staggering(batches), (batches - 1) * attention_s, attention_s)
    assert timing.replica_share == pytest.approx(1)
    assert timing.attention_share == pytest.approx(1)
    assert timing.cycle_s == pytest.approx(batches * attention_s)


@given(BATCHES, st.floats(1e-6, 1.0))
def test_fixed_replicas_wait_for_one_attention_where_the_workers_never_wait(
    batches: int, attention_s: float
) -> None:
    timing = staggering_timing(Staggering(batches, is_fixed=True), (batches - 1) * attention_s, attention_s)
    assert timing.attention_share == pytest.approx(1)
    assert timing.replica_share == pytest.approx((batches - 1) / batches)
    assert timing.cycle_s == pytest.approx(batches * attention_s)


def test_whoever_is_slower_is_busy_and_the_others_wait() -> None:
    slow_slices = staggering_timing(Staggering(3), 4.0, 1.0)
    assert (slow_slices.cycle_s, slow_slices.replica_share, slow_slices.attention_share) == (6, 1, 0.5)
    slow_attention = staggering_timing(Staggering(3), 1.0, 2.0)
    assert (slow_attention.cycle_s, slow_attention.replica_share) == (6, 0.25)
    assert slow_attention.attention_share == 1
    alone = staggering_timing(Staggering(1), 3.0, 1.0)
    assert (alone.cycle_s, alone.replica_share, alone.attention_share) == (4, 0.75, 0.25)
