"""Which sequences the decode room takes in, and which it refuses: events and commands."""

import pytest

from common.errors import HandoverFailed, Overloaded, RequestCancelled
from common.ids import RequestId
from decode import events
from tests.decode.states import FAILED, handle, make_state, owner_of, start, task_of


def test_an_earlier_attempt_that_comes_late_is_refused() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of(attempt=1)))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of()))
    assert list(state.sequences) == [owner_of(attempt=1)]


def test_an_attempt_whose_blocks_rest_in_quarantine_is_not_taken_again() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of()))
    handle(state, events.PullFailed(owner_of(), FAILED, is_drained=False))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of()))
    assert state.is_idle


def test_bounds_are_kept_with_typed_errors() -> None:
    state = make_state(max_batch=1, max_waiting_requests=1)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    with pytest.raises(Overloaded, match=r"instance\.max_waiting_requests"):
        handle(state, events.TaskArrived(task_of("r3")))
    with pytest.raises(HandoverFailed, match="KV blocks"):
        handle(make_state(), events.TaskArrived(task_of("r4", 20, 20)))
    handle(state, events.CancelArrived(RequestId("r5"), 3))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of("r5", attempt=3)))
