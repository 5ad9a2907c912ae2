"""Which prompts the prefill room takes in, and which it refuses: events and commands."""

import pytest

from common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
)
from common.ids import RequestId
from prefill import events
from tests.prefill.states import (
    DECODE,
    LIFE,
    TOKEN,
    arrive,
    check_empty,
    handle,
    make_state,
    offered,
    only,
    owner_of,
)


def test_a_cancellation_that_overtakes_its_task_is_remembered() -> None:
    state = make_state()
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    with pytest.raises(RequestCancelled):
        arrive(state, "r1")
    assert only(arrive(state, "r1", attempt=1), events.RunChunk)


def test_a_later_attempt_supersedes_an_earlier_one() -> None:
    state = make_state()
    offered(state)
    arrive(state, "r1", attempt=1)
    assert list(state.sequences) == [owner_of("r1", 1)]


def test_an_earlier_attempt_that_comes_late_is_refused() -> None:
    state = make_state()
    arrive(state, "r1", attempt=1)
    with pytest.raises(RequestCancelled):
        arrive(state, "r1")
    assert list(state.sequences) == [owner_of("r1", 1)]


def test_a_repeated_task_is_taken_once_and_never_in_the_name_of_one_that_was_given_up() -> None:
    state = make_state()
    arrive(state, "r1")
    assert arrive(state, "r1") == []
    handle(state, events.DecodeInstanceGone(DECODE, LIFE))
    with pytest.raises(RequestCancelled):
        arrive(state, "r1")
    handle(state, events.ChunkFinished((TOKEN,)))
    check_empty(state)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty prompt"):
        arrive(make_state(), "r1", 0)


def test_bounds_are_kept_with_typed_errors() -> None:
    state = make_state(max_waiting_requests=1)
    arrive(state, "r1")
    with pytest.raises(Overloaded, match=r"instance\.max_waiting_requests"):
        arrive(state, "r2")
    with pytest.raises(ContextLengthExceeded, match="KV blocks"):
        arrive(make_state(), "r1", 33)
    handle(state, events.DrainStarted())
    with pytest.raises(NoInstanceReady):
        arrive(state, "r3")
