"""Who is asked to leave a decode instance, by what instances report, and where it is placed then."""

import msgspec

from common.ids import Incarnation, InstanceId, RequestId
from common.messages import InstanceLife, MovableSequence
from scheduler import events
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import ROLES, handle, make_state, ready, report_of

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


def report(
    state: SchedulerState, name: str, need_tokens: int, *movable: MovableSequence, decode_tokens: int = 0
) -> None:
    known = state.instances[InstanceId(name)].report
    told = msgspec.structs.replace(
        report_of(name, ROLES[name[0]], 1 if known is None else known.sequence + 1),
        decode_need_tokens=need_tokens,
        decode_tokens=decode_tokens,
        movable=movable,
    )
    handle(state, events.LoadReported(told))


def asked(state: SchedulerState) -> list[tuple[str, str, str]]:
    commands = handle(state, events.RebalanceDue())
    departures = [each.departure for each in commands if isinstance(each, events.AskToLeave)]
    return [(each.source, each.sequence.request_id, each.destination) for each in departures]


def test_a_sequence_is_asked_to_leave_for_the_instance_that_has_room() -> None:
    assert asked(overfull(d1=500, d2=100)) == [("d0", "r0", "d2")]


def test_mixed_instances_give_and_take_as_decode_instances_do() -> None:
    assert asked(overfull(m0=400, d1=600)) == [("d0", "r0", "m0")]
    state = make_state()
    ready(state, m0=0, m1=0, m2=0)
    report(state, "m0", 1200, MOVABLE)
    report(state, "m1", 600)
    report(state, "m2", 100)
    assert asked(state) == [("m0", "r0", "m2")]


def test_prompts_on_their_way_to_a_mixed_instance_count_there_though_others_are_to_decode_them() -> None:
    state = overfull(d1=700, m0=300)
    assert asked(state) == [("d0", "r0", "m0")]
    report(state, "d0", 1200, MOVABLE, decode_tokens=900)
    report(state, "m0", 300, decode_tokens=500)
    handle(state, events.LoadReported(report_of("p0", "prefill", 2, pending=500)))
    placement = state.place(make_request("r1", 200, 10), 0.0)
    assert (placement.prefill_instance, placement.decode_instance) == ("m0", "d1")
    assert asked(state) == []


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


def test_what_leaves_a_mixed_instance_goes_to_a_mixed_one_only_where_it_is_wanted() -> None:
    """It may also stay: nobody else would take it."""
    state = make_state()
    ready(state, m0=0, m1=0, p0=0)
    former, drawn = InstanceLife(InstanceId("m0"), Incarnation("i1")), make_request("r0", 20)
    for wanted, chosen in (("m1", "m1"), ("m9", "m0"), ("p0", "m0")):
        assert state.place_moved(drawn, former, 1.0, InstanceId(wanted)).decode_instance == chosen


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
