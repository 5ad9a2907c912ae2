"""Requests that wait at the scheduler until an instance has hardly anything to do."""

import msgspec
import pytest

from common.config import PrefillOrder, SchedulerConfig
from common.errors import ContextLengthExceeded, Overloaded, RequestCancelled
from common.ids import Incarnation, RequestId
from common.messages import GenerationRequest, Placement
from common.messages.bookings import BookingsChanged
from common.performance import FittedTime
from scheduler import events
from scheduler.state import SchedulerState
from scheduler.waiting_room import ASKED_AGAIN_WITHIN_S, WaitingRoom
from scheduler.workers import workers_of
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, gateway_record, handle, ready, report_of

SETTINGS = SchedulerConfig(prefill_policy="deferred", bind_below_tokens=100)


def state_of(most: int = 8, order: PrefillOrder = "fcfs", **pending: int) -> SchedulerState:
    state = SchedulerState(LEASE_S, SETTINGS, waiting=WaitingRoom(most, order, window_size=3))
    ready(state, **(pending or {"p0": 500, "d0": 0}))
    return state


def ask(state: SchedulerState, request: GenerationRequest, now: float = 0.0) -> list[str]:
    """Who is bound by that, and where."""
    commands = state.wait(request, now)
    state.check()
    return bound_by(commands)


def bound_by(commands: list[events.SchedulerCommand]) -> list[str]:
    return [
        f"{each.request_id} {each.outcome.prefill_instance}"
        for each in commands
        if isinstance(each, events.EndWait) and isinstance(each.outcome, Placement)
    ]


def report(state: SchedulerState, name: str, sequence: int, pending: int, now: float = 1.0) -> list[str]:
    event = events.LoadReported(report_of(name, "prefill", sequence, pending=pending))
    return bound_by(handle(state, event, now))


def test_who_comes_to_an_idle_mesh_is_bound_at_once() -> None:
    state = state_of(p0=99, d0=0)
    assert ask(state, make_request("r0", 10)) == ["r0 p0"]
    assert len(state.waiting) == 0


def test_who_comes_to_a_busy_one_is_bound_when_an_instance_has_hardly_anything_to_do() -> None:
    """A burst is not dealt out in advance: p1, which is done first, gets what p0 would have had."""
    state = state_of(p0=500, p1=500, d0=0)
    for number in range(4):
        assert ask(state, make_request(f"r{number}", 60), float(number)) == []
    assert report(state, "p0", 9, 100) == []
    assert report(state, "p1", 9, 40) == ["r0 p1"]
    assert report(state, "p1", 10, 40) == []
    handle(state, events.TaskAcknowledged(RequestId("r0"), 0))
    assert report(state, "p1", 11, 0) == ["r1 p1", "r2 p1"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["r0", "r1", "r2", "r3"]),
        ("sjf", ["r1", "r2", "r0", "r3"]),
        ("ljf", ["r0", "r2", "r1", "r3"]),
    ],
)
def test_turns_come_in_the_prefill_order_within_a_window(order: PrefillOrder, expected: list[str]) -> None:
    room = WaitingRoom(8, order, window_size=3)
    for number, tokens in enumerate((90, 10, 50, 1)):
        room.enter(make_request(f"r{number}", tokens), float(number))
    turns = []
    while (request := room.next_in_turn(9.0)) is not None:
        turns.append(request.request_id)
        room.leave(request.request_id)
        room.check()
    assert turns == expected


def test_a_full_room_turns_requests_away_until_the_next_turn_but_not_those_that_ask_again() -> None:
    """Of 500 tokens at 100/s all but 100 are to be computed before it; by what was learned that takes 20 ms
    a token and a second a chunk."""
    state = state_of(most=2)
    for name in ("r0", "r1", "r0"):
        ask(state, make_request(name))
    with pytest.raises(Overloaded, match="max_deferred_requests") as refused:
        state.wait(make_request("r2"), 0.0)
    assert refused.value.retry_after_s == 4.0
    learned = msgspec.structs.replace(
        report_of("p0", "prefill", 9, pending=500), chunk_time=FittedTime((20.0, 0.0, 1.0), 0.0, 100)
    )
    handle(state, events.LoadReported(learned))
    with pytest.raises(Overloaded) as refused:
        state.wait(make_request("r2"), 0.0)
    assert refused.value.retry_after_s == 9.0
    state.check()


def test_only_who_has_a_call_at_hand_is_bound() -> None:
    state = state_of()
    ask(state, make_request("r0", 60), 0.0)
    ask(state, make_request("r1", 60), 0.1)
    handle(state, events.CallAnswered(RequestId("r0")), 0.2)
    assert report(state, "p0", 9, 60) == ["r1 p0"]
    handle(state, events.TaskAcknowledged(RequestId("r1"), 0))
    assert report(state, "p0", 10, 0) == []
    assert ask(state, make_request("r0", 60), 2.0) == ["r0 p0"]


def test_for_whom_nobody_asks_any_more_gives_the_place_up() -> None:
    state = state_of()
    ask(state, make_request("r0"))
    handle(state, events.CallAnswered(RequestId("r0")), 1.0)
    handle(state, events.LoadReported(report_of("p0", "prefill", 9, pending=500)), 1.0 + LEASE_S)
    handle(state, events.TimePassed(), 1.0 + ASKED_AGAIN_WITHIN_S)
    assert len(state.waiting) == 1
    handle(state, events.TimePassed(), 1.1 + ASKED_AGAIN_WITHIN_S)
    assert len(state.waiting) == 0


def test_the_end_of_a_request_ends_its_wait_but_not_that_of_a_later_attempt() -> None:
    state = state_of()
    ask(state, make_request("r0", attempt=1))
    assert handle(state, events.RequestOver(RequestId("r0"), attempt=0)) == []
    [ended] = handle(state, events.RequestOver(RequestId("r0"), attempt=1))
    assert isinstance(ended, events.EndWait)
    assert isinstance(ended.outcome, RequestCancelled)
    assert len(state.waiting) == 0
    with pytest.raises(RequestCancelled):
        state.wait(make_request("r0", attempt=0), 0.0)


def test_a_later_attempt_keeps_the_place_and_an_earlier_one_is_refused() -> None:
    state = state_of()
    ask(state, make_request("r0", 60), 0.0)
    ask(state, make_request("r1", 60), 0.1)
    ask(state, make_request("r0", 60, attempt=1), 0.2)
    with pytest.raises(RequestCancelled):
        state.wait(make_request("r0", 60), 0.3)
    assert report(state, "p0", 9, 60) == ["r0 p0"]
    assert state.is_placed(RequestId("r0"), 1)


def test_a_gateway_that_is_gone_waits_no_more() -> None:
    state = state_of()
    handle(state, events.MembersRead((gateway_record(),)), 0.0)
    ask(state, make_request("r0"))
    handle(state, events.MembersRead(()), 1.0)
    handle(state, events.MembersRead(()), 1.1 + LEASE_S)
    assert len(state.waiting) == 0


def test_one_that_fits_nowhere_is_refused_and_holds_nobody_up() -> None:
    state = state_of(p0=0, d0=0)
    [refused] = state.wait(make_request("r0", 5000), 0.0)
    assert isinstance(refused, events.EndWait)
    assert isinstance(refused.outcome, ContextLengthExceeded)
    assert ask(state, make_request("r1", 10)) == ["r1 p0"]


def test_what_waits_here_counts_where_roles_are_decided_as_in_the_queues_it_waits_for() -> None:
    state = state_of(p0=500, m0=500, d0=0)
    for number in range(3):
        ask(state, make_request(f"r{number}", 50), float(number))
    assert {each.instance_id: each.queue_tokens for each in workers_of(state)} == {
        "p0": 575,
        "m0": 575,
        "d0": 0,
    }


def test_who_has_waited_elsewhere_keeps_its_turn_and_is_not_refused_by_a_full_room() -> None:
    """Each ask may reach another scheduler, and what it does not reach lapses."""
    state = state_of(most=1)
    assert ask(state, make_request("r0", 10), 10.0) == []
    state.wait(make_request("r1", 10), 11.0, waited_s=4.0)
    state.check()
    with pytest.raises(Overloaded):
        state.wait(make_request("r2", 10), 11.0)
    assert report(state, "p0", 9, 95, now=12.0) == ["r1 p0"]


def test_whose_turn_has_come_at_another_scheduler_waits_here_no_more() -> None:
    state, other = state_of(), state_of(p0=0, d0=0)
    other.bookings.incarnation, other.bookings.is_heard = Incarnation("other"), True
    assert ask(state, make_request("r0", 10)) == []
    assert ask(state, make_request("r1", 10)) == []
    assert ask(other, make_request("r0", 10)) == ["r0 p0"]
    told = BookingsChanged("other", Incarnation("other"), 1, other.bookings.take_changes())
    commands = handle(state, events.PeerHeard(told))
    [ended] = [each for each in commands if isinstance(each, events.EndWait)]
    assert ended.request_id == "r0"
    assert isinstance(ended.outcome, RequestCancelled)
    assert RequestId("r0") not in state.waiting
    assert report(state, "p0", 9, 0) == ["r1 p0"]
