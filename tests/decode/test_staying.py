"""Sequences whose prompts were computed here: they run at once, over the blocks that they have."""

import pytest

from common.kv.blocks import BlockOwner
from common.messages import DecodeTask
from decode import events
from decode.forecast import least_spare_s
from decode.state import DecodeState
from tests.decode.states import end_step, handle, kinds, make_state, owner_of, start, task_of

KEPT = BlockOwner("kept", owner_of("r9").request_id, 0)


def stay(state: DecodeState, task: DecodeTask, held_by: BlockOwner = KEPT) -> list[events.DecodeCommand]:
    assert state.blocks.try_allocate(held_by, -(-task.kv_tokens // state.block_size))
    return handle(state, events.SequenceStayed(held_by, task))


def test_it_is_in_the_next_step_with_its_blocks_and_nothing_is_pulled() -> None:
    state = make_state()
    start(state, "r1")
    held = stay(state, task_of("r9", prompt_tokens=7))
    assert not held
    [step] = kinds(end_step(state), events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r1"), owner_of("r9")]
    assert (step.rows[1].position, step.rows[1].output_ids) == (7, [7])


def test_where_the_batch_is_full_it_waits_for_its_turn_with_its_kv() -> None:
    state = make_state(max_batch=1)
    start(state, "r1", max_tokens=3)
    stay(state, task_of("r9"))
    [step] = kinds(end_step(state), events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r1")]
    [step] = kinds(end_step(state), events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r9")]


def test_one_whose_later_attempt_is_here_or_that_was_cancelled_leaves_nothing() -> None:
    state = make_state()
    start(state, "r1")
    later = task_of("r9", attempt=1)
    handle(state, events.TaskArrived(later))
    assert not stay(state, task_of("r9"))
    assert owner_of("r9") not in state.sequences
    handle(state, events.CancelArrived(later.request.request_id, 1))
    stay(state, later, BlockOwner("kept", later.request.request_id, 1))
    assert list(state.sequences) == [owner_of("r1")]
    assert state.blocks.used_blocks == len(state.blocks.block_table(owner_of("r1")))


def test_it_takes_the_place_of_an_earlier_attempt() -> None:
    state = make_state()
    start(state, "r1", "r9")
    stay(state, task_of("r9", attempt=1), BlockOwner("kept", owner_of("r9").request_id, 1))
    assert list(state.sequences) == [owner_of("r1"), owner_of("r9", 1)]


def test_how_long_it_can_stand_still_is_what_it_is_ahead_of_its_pace_since_it_came() -> None:
    """At 0.5 s a token: one that took 0.3 s leaves 0.2 s."""
    state = make_state()

    def spare_s(now: float) -> float | None:
        return least_spare_s(state.sequences.values(), lambda service_class: 0.5, now)

    assert spare_s(0.0) is None
    assert state.blocks.try_allocate(KEPT, 1)
    handle(state, events.SequenceStayed(KEPT, task_of("r9")), now=10.0)
    assert spare_s(10.0) == 0.0
    end_step(state)
    assert spare_s(10.3) == pytest.approx(0.5 - 0.3)
    assert spare_s(12.3) == pytest.approx(0.5 - 2.3)


def test_an_attempt_that_another_instance_has_computed_too_is_decoded_once() -> None:
    """A prefill instance was slow to say that it has the prompt, so this one was given it as well."""
    state = make_state()
    start(state, "r9")
    assert not stay(state, task_of("r9"))
    assert list(state.sequences) == [owner_of("r9")]
    assert state.blocks.owners() == [owner_of("r9")]
    [step] = kinds(end_step(state), events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r9")]
    waiting = make_state(total_blocks=4)
    start(waiting, "r1", prompt_tokens=11, max_tokens=4)
    handle(waiting, events.TaskArrived(task_of("r9", prompt_tokens=4)))
    assert not stay(waiting, task_of("r9", prompt_tokens=4))
    assert KEPT not in waiting.blocks.owners()


def test_all_wait_for_memory_while_no_step_computes_and_no_kv_is_on_its_way() -> None:
    """Here the prefill room has the blocks that they lack."""
    state = make_state(total_blocks=3)
    theirs = BlockOwner("prefill", owner_of("r0").request_id, 0)
    assert state.blocks.try_allocate(theirs, 3)
    handle(state, events.TaskArrived(task_of("r1")), now=1.0)
    handle(state, events.BlocksFreed(), now=2.0)
    assert state.mates.stuck_since_s == 1.0
    state.blocks.release(theirs)
    handle(state, events.BlocksFreed(), now=3.0)
    assert state.mates.stuck_since_s is None
