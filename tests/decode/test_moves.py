"""Sequences that move between attention workers, as events and commands."""

import pytest

from common.errors import KVLost
from common.ids import RequestId
from common.lifecycle import DecodePhase
from common.messages import SampledToken
from common.sequences import PublishFailure
from decode import events
from decode.moves import MAX_FAILED_MOVES
from decode.state import DecodeState
from tests.decode.states import LIFE, PREFILL, end_step, handle, kinds, make_state, owner_of, start, task_of

R1, R2 = owner_of("r1"), owner_of("r2")


def two_pools(*, max_moves: int) -> DecodeState:
    """``r1`` and ``r2`` run in pool 0, none is in a step, and pool 1 is empty; nothing moves yet."""
    state = make_state(total_blocks=16, max_moves=max_moves)
    start(state, "r1", "r2", max_tokens=40)
    handle(state, events.StepFinished((SampledToken(8),)))
    handle(state, events.PoolAdded(16))
    return state


def moving() -> tuple[DecodeState, events.MoveSequence]:
    """Pool 0 drains, and ``r1`` is on its way to pool 1."""
    state = two_pools(max_moves=1)
    handle(state, events.PoolClosed(0))
    [move] = kinds(end_step(state), events.MoveSequence)
    return state, move


def rows(state: DecodeState) -> list[str]:
    return [row.owner.request_id for row in state.batches.steps.get(0, ())]


def test_a_sequence_leaves_the_batch_while_it_moves_and_goes_on_in_the_other_pool() -> None:
    state, move = moving()
    sequence = state.sequences[R1]
    assert (move.owner, move.tokens, sequence.phase) == (R1, sequence.position, DecodePhase.MOVING)
    assert {state.blocks.pool_of(owner) for owner in (R1, R2)} == {0}
    assert (rows(state), state.running) == (["r2"], 2)
    tokens = list(sequence.output_ids)
    handle(state, events.MoveFinished(R1))
    assert state.blocks.pool_of(R1) == 1
    assert tuple(state.blocks.block_table(R1)[: len(move.blocks)]) == move.destination_blocks
    [second] = kinds(end_step(state), events.MoveSequence)
    assert (second.owner, rows(state), sequence.output_ids) == (R2, ["r1"], tokens)
    handle(state, events.MoveFinished(R2))
    handle(state, events.PoolLeft(0))
    assert state.blocks.pools == [1]


def test_a_sequence_that_moves_has_all_its_kv_and_is_not_withdrawn() -> None:
    state, _ = moving()
    handle(state, events.OfferWithdrawn(R1, PREFILL, LIFE))
    assert not state.sequences[R1].is_cancelled
    handle(state, events.MoveFinished(R1))
    end_step(state)
    assert "r1" in rows(state)


def test_only_so_many_move_at_once_and_none_where_that_is_switched_off() -> None:
    for max_moves in (0, 1, 2):
        state = two_pools(max_moves=max_moves)
        handle(state, events.PoolClosed(0))
        assert len(kinds(end_step(state), events.MoveSequence)) == max_moves


def test_a_new_pool_takes_over_half_of_the_context_and_then_nothing_moves() -> None:
    state = make_state(total_blocks=200, max_moves=1)
    start(state, "r1", "r2", "r3", "r4", prompt_tokens=60, max_tokens=100)
    end_step(state)
    handle(state, events.PoolAdded(200))
    while kinds(end_step(state), events.MoveSequence):
        handle(state, events.MoveFinished(next(iter(state.moves.moving))))
    assert sorted(map(state.blocks.pool_of, state.sequences)) == [0, 0, 1, 1]


def crowded(max_batch: int) -> DecodeState:
    """Three in pool 0, one in pool 1, with room for one more, and ``long`` waits for
    more than that."""
    state = make_state(total_blocks=16, max_batch=max_batch, max_moves=1)
    start(state, "r1", "r2", "r3", prompt_tokens=12, max_tokens=40)
    end_step(state)
    handle(state, events.PoolAdded(16))
    start(state, "short", prompt_tokens=4, max_tokens=40)
    handle(state, events.TaskArrived(task_of("long", 56, 8)))
    assert state.waiting == 1
    return state


def test_balance_waits_for_whoever_waits_for_memory() -> None:
    state = crowded(max_batch=8)
    assert not kinds(end_step(state), events.MoveSequence)
    handle(state, events.CancelArrived(RequestId("long"), 0))
    assert kinds(end_step(state), events.MoveSequence)


def test_balance_does_not_wait_for_whoever_waits_for_a_slot_and_a_drain_for_nobody() -> None:
    assert kinds(end_step(crowded(max_batch=4)), events.MoveSequence)
    state = crowded(max_batch=8)
    handle(state, events.PoolClosed(0))
    assert kinds(end_step(state), events.MoveSequence)


def test_a_failed_move_costs_nothing_but_its_time_and_is_tried_only_so_often() -> None:
    state = two_pools(max_moves=1)
    handle(state, events.CancelArrived(RequestId("r2"), 0))
    handle(state, events.PoolClosed(0))
    for _ in range(MAX_FAILED_MOVES):
        [move] = kinds(end_step(state), events.MoveSequence)
        commands = handle(state, events.MoveFailed(R1))
        assert not kinds(commands, PublishFailure)
        assert kinds(commands, events.RunStep)
        assert state.blocks.pool_of(R1) == 0
        # While that rests, it is not tried again.
        assert state.blocks.quarantined_blocks >= len(move.destination_blocks)
        assert not kinds(end_step(state), events.MoveSequence)
        handle(state, events.MoveDrained(R1))
        assert (state.blocks.quarantined_blocks, state.blocks.free_blocks_in(1)) == (0, 16)
    assert not kinds(end_step(state), events.MoveSequence)
    assert rows(state) == ["r1"]


def test_while_a_failed_moves_blocks_rest_nobody_moves_into_that_pool() -> None:
    state, _ = moving()
    handle(state, events.MoveFailed(R1))
    assert not kinds(end_step(state), events.MoveSequence)
    assert rows(state) == ["r1", "r2"]
    handle(state, events.MoveDrained(R1))
    assert kinds(end_step(state), events.MoveSequence)


def test_where_the_old_pool_is_lost_the_kv_that_has_come_is_enough() -> None:
    state, _ = moving()
    handle(state, events.PoolLost(0))
    assert R1 in state.sequences
    assert not kinds(handle(state, events.MoveFinished(R1)), PublishFailure)
    assert state.blocks.pool_of(R1) == 1
    handle(state, events.StepFinished((None,)))
    assert rows(state) == ["r1"]
    assert state.blocks.pools == [1]


def test_a_move_that_fails_with_its_source_sends_the_sequence_back_and_rests_the_destination() -> None:
    state, move = moving()
    handle(state, events.PoolLost(0))
    [failure] = kinds(handle(state, events.MoveFailed(R1)), PublishFailure)
    assert (failure.failure.request_id, failure.failure.error.code) == ("r1", KVLost.code)
    assert failure.failure.can_continue
    assert state.blocks.quarantined_blocks == len(move.destination_blocks) + (move.tokens % 4 == 0)
    handle(state, events.MoveDrained(R1))
    assert state.blocks.free_blocks_in(1) == 16


@pytest.mark.parametrize("has_arrived", [True, False])
def test_where_the_new_pool_is_lost_the_sequence_goes_on_in_the_old_one(has_arrived: bool) -> None:
    state, _ = moving()
    handle(state, events.PoolLost(1))
    event = events.MoveFinished(R1) if has_arrived else events.MoveFailed(R1)
    assert not kinds(handle(state, event), PublishFailure)
    end_step(state)
    assert rows(state) == ["r1", "r2"]
    if not has_arrived:
        handle(state, events.MoveDrained(R1))
    assert state.blocks.pools == [0]


@pytest.mark.parametrize("has_arrived", [True, False])
def test_what_is_cancelled_while_it_moves_frees_both_sides_when_that_is_over(has_arrived: bool) -> None:
    state, _ = moving()
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert R1 in state.sequences
    event = events.MoveFinished(R1) if has_arrived else events.MoveFailed(R1)
    assert not kinds(handle(state, event), PublishFailure)
    assert R1 not in state.sequences
    if not has_arrived:
        handle(state, events.MoveDrained(R1))
    assert state.blocks.owners() == [R2]
    assert state.blocks.quarantined_blocks == 0


def test_an_instance_that_drains_lets_moves_end_and_sends_back_what_is_left() -> None:
    state, _ = moving()
    handle(state, events.DrainStarted())
    failures = kinds(handle(state, events.DrainExpired()), PublishFailure)
    assert {each.failure.request_id for each in failures} == {"r1", "r2"}
    assert not state.is_idle
    handle(state, events.MoveFinished(R1))
    end_step(state)
    assert state.is_idle


def test_word_of_a_move_that_is_not_under_way_raises_and_changes_nothing() -> None:
    state, _ = moving()
    for event in (events.MoveFinished(R2), events.MoveFailed(R2), events.MoveDrained(R1)):
        with pytest.raises(ValueError, match=r"moved|quarantine"):
            handle(state, event)
        state.check()
