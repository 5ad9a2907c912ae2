"""Whom a request is offered to, one after another, and what its gateway is told where nobody takes it."""

import pytest

from common.errors import InvalidRequest, NoInstanceReady, Overloaded, RequestCancelled, RequestError
from common.messages import Placement
from scheduler import events
from scheduler.delivery import NO_ANSWER, NO_ANSWER_RETRY_S, Delivery
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import handle, make_state, ready


@pytest.fixture
def state() -> SchedulerState:
    state = make_state()
    ready(state, p0=0, p1=1, p2=2, d0=0)
    return state


def fail(delivery: Delivery, placement: Placement, answer: RequestError | None) -> RequestError | None:
    """What is told, once the state has heard of it."""
    happened, told = delivery.fail(placement, answer)
    for event in happened:
        handle(delivery.state, event)
    return told


def test_who_refuses_or_does_not_answer_is_not_asked_again(state: SchedulerState) -> None:
    delivery = Delivery(state, make_request("r1"), 3)
    first = delivery.place(0.0)
    assert fail(delivery, first, Overloaded("full")) is None
    second = delivery.place(0.0)
    assert fail(delivery, second, None) is None
    third = delivery.place(0.0)
    tried = [each.prefill_instance for each in (first, second, third)]
    assert tried == ["p0", "p1", "p2"]
    # Who did not answer is suspected by everybody, who refused by nobody.
    assert state.place(make_request("r2"), 0.0).prefill_instance == "p0"
    handle(state, delivery.succeed())
    assert state.requests[delivery.request.request_id].acknowledged_s is not None
    assert state.place(make_request("r3", 100), 0.0).prefill_instance != "p1"


def test_after_so_many_attempts_the_last_refusal_is_told(state: SchedulerState) -> None:
    delivery = Delivery(state, make_request("r1"), 2)
    assert fail(delivery, delivery.place(0.0), Overloaded("this one is full")) is None
    assert fail(delivery, delivery.place(0.0), None) is None
    with pytest.raises(Overloaded, match="this one is full"):
        delivery.place(0.0)


def test_where_nobody_is_left_it_is_told_what_those_said_that_were_there() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    delivery = Delivery(state, make_request("r1"), 3)
    assert fail(delivery, delivery.place(0.0), None) is None
    with pytest.raises(NoInstanceReady, match=NO_ANSWER) as caught:
        delivery.place(0.0)
    assert caught.value.retry_after_s == NO_ANSWER_RETRY_S
    with pytest.raises(NoInstanceReady) as never_tried:
        Delivery(make_state(), make_request("r2"), 3).place(0.0)
    assert NO_ANSWER not in str(never_tried.value)


def test_what_is_wrong_with_the_request_is_told_at_once(state: SchedulerState) -> None:
    delivery = Delivery(state, make_request("r1"), 3)
    wrong = InvalidRequest("no such thing", param="prompt")
    assert fail(delivery, delivery.place(0.0), wrong) is wrong
    assert not state.requests


def test_one_that_ended_meanwhile_is_not_placed_anew(state: SchedulerState) -> None:
    delivery = Delivery(state, make_request("r1"), 3)
    placement = delivery.place(0.0)
    handle(state, events.RequestOver(delivery.request.request_id))
    assert isinstance(fail(delivery, placement, Overloaded("full")), RequestCancelled)
    assert not state.requests


def test_a_placement_that_is_booked_already_is_the_first(state: SchedulerState) -> None:
    request = make_request("r1")
    bound = state.place(request, 0.0)
    delivery = Delivery(state, request, 2, bound)
    assert delivery.place(0.0) is bound
    assert delivery.task(bound).decode_instance == "d0"
    assert fail(delivery, bound, Overloaded("full")) is None
    assert delivery.place(0.0).prefill_instance != bound.prefill_instance
