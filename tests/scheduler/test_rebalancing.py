"""Who is asked to leave a decode instance, by what instances report, and where it is placed then."""

import msgspec

from common.ids import Incarnation, InstanceId, RequestId
from common.messages import InstanceLife, MovableSequence
from scheduler import events
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.test_state import handle, make_state, ready, report_of

MOVABLE = MovableSequence(RequestId("r0"), 0, 100, 300, has_begun=True)
"""Of pools of 1,024 tokens."""


def overfull(**needs: int) -> SchedulerState:
    """d0 is expected to need too much, the others as much as is said."""
    state = make_state()
    ready(state, p0=0, d0=0, **dict.fromkeys(needs, 0))
    report(state, "d0", 1200, MOVABLE)
    for name, need_tokens in needs.items():
        report(state, name, need_tokens)
    return state


def report(state: SchedulerState, name: str, need_tokens: int, *movable: MovableSequence) -> None:
    told = msgspec.structs.replace(
        report_of(name, "decode", 2), decode_need_tokens=need_tokens, movable=movable
    )
    handle(state, events.LoadReported(told))


def asked(state: SchedulerState) -> list[tuple[str, str, str]]:
    commands = handle(state, events.RebalanceDue())
    departures = [each.departure for each in commands if isinstance(each, events.AskToLeave)]
    return [(each.source, each.sequence.request_id, each.destination) for each in departures]


def test_a_sequence_is_asked_to_leave_for_the_instance_that_has_room() -> None:
    assert asked(overfull(d1=500, d2=100)) == [("d0", "r0", "d2")]


def test_nobody_is_asked_where_nobody_has_room_or_what_has_it_is_full_drains_or_has_another_role() -> None:
    assert asked(overfull(d1=600)) == []
    state = overfull(d1=0)
    draining = report_of("d1", "decode", 3, draining=True)
    handle(state, events.LoadReported(draining))
    assert asked(state) == []
    state = overfull(d1=0)
    handle(state, events.LoadReported(report_of("d1", "prefill", 3)))
    assert asked(state) == []


def test_what_is_still_on_its_way_to_an_instance_counts_there() -> None:
    state = overfull(d1=0)
    chosen = [state.place(make_request(f"r{number}", 450, 10), 0.0).decode_instance for number in (1, 2)]
    assert chosen == ["d0", "d1"]
    assert asked(state) == []


def test_what_will_be_drawn_beyond_the_predictions_counts_where_requests_are_placed() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=0)
    told = msgspec.structs.replace(report_of("d0", "decode", 2), decode_coming_tokens=500)
    handle(state, events.LoadReported(told))
    assert state.instances[InstanceId("d0")].for_decode.coming_tokens == 500
    state.check()


def test_a_sequence_that_leaves_goes_where_it_is_wanted_unless_that_is_gone() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=0, d2=0)
    former, drawn = InstanceLife(InstanceId("d0"), Incarnation("i1")), make_request("r0", 20)
    state.place(make_request("r1", 50), 0.0)
    for wanted, chosen in (("d1", "d1"), ("d2", "d2"), ("d9", "d1")):
        placement = state.place_moved(drawn, former, 1.0, InstanceId(wanted))
        assert placement.decode_instance == chosen


def test_who_has_just_refused_a_sequence_gets_it_again_only_where_nobody_else_is_ready() -> None:
    """Its next report is still on its way, and it would be the least loaded."""
    refused, former = InstanceId("d1"), InstanceLife(InstanceId("p0"), Incarnation("i1"))
    for others, chosen in (((), "d1"), (("d2",), "d2")):
        state = make_state()
        ready(state, p0=0, d1=0, **dict.fromkeys(others, 0))
        for name in others:
            told = msgspec.structs.replace(report_of(name, "decode", 2), decode_tokens=100)
            handle(state, events.LoadReported(told))
        placement = state.place_moved(make_request("r0", 20), former, 1.0, refused=refused)
        assert placement.decode_instance == chosen
