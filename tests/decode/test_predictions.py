"""What a decode instance is told of how long its sequences will be."""

from common.lengths import certain
from decode import events
from tests.decode.states import end_step, handle, make_state, owner_of, start, task_of


def test_a_prediction_takes_the_place_of_what_the_task_said() -> None:
    state = make_state(total_blocks=32)
    start(state, "r1", max_tokens=50)
    assert state.sequences[owner_of()].coming_tokens == 49
    handle(state, events.LengthPredicted(owner_of(), certain(11)))
    assert state.sequences[owner_of()].coming_tokens == 10
    end_step(state)
    assert state.sequences[owner_of()].coming_tokens == 9


def test_a_prediction_may_come_before_its_sequence() -> None:
    state = make_state(total_blocks=32)
    handle(state, events.LengthPredicted(owner_of(), certain(11)))
    handle(state, events.LengthPredicted(owner_of(attempt=1), certain(30)))
    handle(state, events.TaskArrived(task_of(max_tokens=50)))
    assert state.sequences[owner_of()].coming_tokens == 10


def test_a_sequence_waits_for_room_by_what_is_predicted_of_it() -> None:
    """Reserve-static: the second one would be admitted beside the first were it as short as predicted."""
    state = make_state(total_blocks=6, admission="reserve_static")
    start(state, "r1", max_tokens=4)
    handle(state, events.TaskArrived(task_of("r2", max_tokens=16)))
    assert state.waiting == 1
    assert not state.pulls.owners
    handle(state, events.LengthPredicted(owner_of("r2"), certain(3)))
    assert owner_of("r2") in state.pulls.owners
