"""Steps that are chosen when the engine asks, as it computes for the instance's other room: events and
commands."""

import pytest

from common.config import MixedPolicy
from decode import events
from decode.state import DecodeState
from tests.decode.states import end_step, handle, kinds, make_state, owner_of, start, task_of
from tests.decode.test_staying import KEPT, stay


def rows_of(commands: list[events.DecodeCommand]) -> list[str]:
    """Of the step that begins."""
    [step] = kinds(commands, events.RunStep)
    return [row.owner.request_id for row in step.rows]


def sharing_state(*names: str, policy: MixedPolicy = "chunked") -> DecodeState:
    """A step of ``names`` is under way, the first one's second, and prompts wait."""
    state = make_state(total_blocks=100)
    state.mates.policy, state.mates.is_mixed = policy, True
    start(state, *names)
    end_step(state)
    state.mates.take_engine("decode")
    state.mates.waiting_prompts = 1
    return state


def test_sequences_that_stay_when_a_chunk_ends_are_all_in_the_next_step() -> None:
    state = make_state()
    state.mates.take_engine("prefill")
    assert kinds(stay(state, task_of("r9")), events.RunStep) == []
    assert (
        kinds(stay(state, task_of("r8"), KEPT._replace(request_id=owner_of("r8").request_id)), events.RunStep)
        == []
    )
    assert state.mates.step_due_s == 0.0
    assert rows_of(handle(state, events.PassDue(), 1.0)) == ["r9", "r8"]
    assert state.mates.step_due_s is None


@pytest.mark.parametrize("policy", ["chunked", "splitwise", "prefill_first"])
def test_where_prompts_want_the_engine_too_the_next_step_is_due_and_who_comes_is_in_it(
    policy: MixedPolicy,
) -> None:
    state = sharing_state("r1", "r2", policy=policy)
    assert kinds(end_step(state, now=1.0), events.RunStep) == []
    assert state.mates.step_due_s == 1.0
    state.mates.take_engine("prefill")
    stay(state, task_of("r9"))
    assert state.mates.step_due_s == 1.0, "it has waited since then"
    assert not state.batches.is_computing
    assert rows_of(handle(state, events.PassDue(), 2.0)) == ["r1", "r2", "r9"]


def test_without_prompts_steps_follow_on_one_another_unasked() -> None:
    state = sharing_state("r1")
    state.mates.waiting_prompts = 0
    assert rows_of(end_step(state)) == ["r1"]


def test_who_leaves_while_a_step_is_due_is_not_in_it() -> None:
    state = sharing_state("r1", "r2")
    end_step(state)
    used = state.blocks.used_blocks
    handle(state, events.CancelArrived(owner_of("r1").request_id, 0))
    assert owner_of("r1") not in state.sequences, "nobody computes it: it need not wait for the end of a step"
    assert state.blocks.used_blocks < used
    assert rows_of(handle(state, events.PassDue())) == ["r2"]


def test_rows_are_kept_over_the_other_room_s_passes() -> None:
    state = sharing_state("r1", "r2")
    kept = state.batches.outlook(0)
    for second in (5, 6):
        end_step(state)
        [step] = kinds(handle(state, events.PassDue()), events.RunStep)
        assert [row.position for row in step.rows] == [second + 1, second]
        assert state.batches.outlook(0) is kept


def test_where_all_have_ended_nothing_is_due() -> None:
    state = sharing_state("r1")
    handle(state, events.CancelArrived(owner_of("r1").request_id, 0))
    end_step(state)
    assert state.mates.step_due_s is None


def test_who_waits_for_its_turn_is_not_stuck() -> None:
    state = sharing_state("r1")
    end_step(state)
    assert state.mates.stuck_since_s is None


def test_pulls_ask_for_as_much_while_a_step_is_due_as_beside_one() -> None:
    asked: list[list[events.PullSequence]] = []
    for waiting_prompts in (0, 1):
        state = sharing_state("r1")
        state.mates.waiting_prompts = waiting_prompts
        for name in ("p1", "p2", "p3"):
            handle(state, events.TaskArrived(task_of(name)))
        asked.append(kinds(end_step(state, now=1.0), events.PullSequence))
    assert [(each.owner, each.max_bytes) for each in asked[0]] == [
        (each.owner, each.max_bytes) for each in asked[1]
    ]
    assert len(asked[0]) == 1


def test_where_steps_are_bounded_all_that_came_while_one_was_due_are_counted() -> None:
    state = make_state(total_blocks=100, most_context=1000)
    state.mates.take_engine("prefill")
    for name in ("r7", "r8", "r9"):
        stay(state, task_of(name), KEPT._replace(request_id=owner_of(name).request_id))
    assert state.mates.decoding == 3
