"""Who is there, and whose bookings go with those that have left."""

import msgspec
import pytest

from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.messages import (
    InstanceLife,
    Role,
)
from scheduler import events
from scheduler.membership import STALE_AFTER_S
from tests.requests import GATEWAY, make_request
from tests.scheduler.states import (
    LEASE_S,
    ROLES,
    gateway_record,
    handle,
    make_state,
    ready,
    record_of,
    report_of,
)


def test_an_instance_that_did_not_answer_is_avoided_until_it_is_heard_of() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=50)
    handle(state, events.InstanceSuspected(InstanceId("d0")))
    assert state.place(make_request("r1"), 0.0).decode_instance == "d1"
    handle(state, events.LoadReported(report_of("d0", "decode", 2)))
    assert state.place(make_request("r2"), 0.0).decode_instance == "d0"


def test_silence_for_a_lease_is_announced_once_whatever_the_store_says() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    handle(state, events.LoadReported(report_of("p0", "prefill", 2)), now=LEASE_S)
    gone = events.AnnounceInstanceGone(InstanceId("d0"), Incarnation("i1"))
    assert handle(state, events.TimePassed(), now=LEASE_S + 0.1) == [gone]
    assert handle(state, events.TimePassed(), now=LEASE_S + 0.2) == []


def test_who_is_seen_to_end_is_gone_at_once_and_not_there_again_for_its_record() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=50)
    life = record_of("d0", "decode").life
    gone = events.AnnounceInstanceGone(life.instance_id, life.incarnation)
    assert handle(state, events.InstanceEnded(life)) == [gone]
    assert handle(state, events.InstanceEnded(life)) == []
    instances = [record_of(name, ROLES[name[0]]) for name in ("p0", "d0", "d1")]
    assert handle(state, events.MembersRead((gateway_record(), *instances))) == []
    assert state.place(make_request("r1"), 0.0).decode_instance == "d1"
    assert handle(state, events.TimePassed(), now=LEASE_S) == []
    # Its next life is another one.
    anew = (gateway_record(), record_of("p0", "prefill"), record_of("d0", "decode", "i2"))
    assert handle(state, events.MembersRead(anew)) == []
    assert InstanceId("d0") in state.instances
    assert handle(state, events.InstanceEnded(life)) == [], "it was the former one's"
    assert not state.members.ended, "the store has forgotten it"


def test_attention_workers_are_known_of_until_the_store_has_lacked_them_for_a_lease() -> None:
    state = make_state()
    worker = msgspec.structs.replace(gateway_record(), service_id="attention-0", kind="attention")
    handle(state, events.MembersRead((gateway_record(),)), now=0.0)
    assert not state.members.has_attention(0.0)
    handle(state, events.MembersRead((gateway_record(), worker)), now=1.0)
    handle(state, events.MembersRead((gateway_record(),)), now=1.5)
    assert state.members.has_attention(1.0 + LEASE_S)
    assert not state.members.has_attention(1.1 + LEASE_S)


def test_who_was_wrongly_seen_to_end_is_a_member_again_once_it_reports() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    record = record_of("d0", "decode")
    handle(state, events.InstanceEnded(record.life))
    assert handle(state, events.LoadReported(report_of("d0", "decode", 2))) == [events.ReadMembers()]
    handle(state, events.MembersRead((gateway_record(), record_of("p0", "prefill"), record)))
    handle(state, events.LoadReported(report_of("d0", "decode", 3)))
    assert state.place(make_request("r1"), 0.0).decode_instance == "d0"


def test_an_instance_that_drained_is_gone_as_it_said() -> None:
    """With work left, too: what a drain did not finish in its time goes on elsewhere."""
    state = make_state()
    ready(state, p0=0, p1=0, p2=0)
    handle(state, events.LoadReported(report_of("p0", "prefill", 2, draining=True)))
    busy = msgspec.structs.replace(report_of("p1", "prefill", 2, draining=True), handovers_waiting=1)
    handle(state, events.LoadReported(busy))
    gone = handle(state, events.TimePassed(), now=LEASE_S + 0.1)
    assert gone == [
        events.AnnounceInstanceGone(InstanceId(name), Incarnation("i1"), name != "p2")
        for name in ("p0", "p1", "p2")
    ]


def test_a_new_incarnation_replaces_the_old_one_and_says_so() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    state.place(make_request("r1"), 0.0)
    handle(state, events.TaskAcknowledged(RequestId("r1"), 0))
    assert handle(state, events.LoadReported(report_of("p0", "prefill", incarnation="i2"))) == [
        events.ReadMembers()
    ]
    records = (gateway_record(), record_of("p0", "prefill", "i2"), record_of("d0", "decode"))
    gone = events.AnnounceInstanceGone(InstanceId("p0"), Incarnation("i1"))
    assert handle(state, events.MembersRead(records)) == [gone]
    assert not state.requests


@pytest.mark.parametrize("outcome", [events.TaskAcknowledged, events.TaskUndelivered])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_task_under_way_outlives_its_instance_until_its_delivery_is_decided(
    name: str, outcome: type[events.TaskAcknowledged | events.TaskUndelivered]
) -> None:
    """Whoever delivers it must not take it for a request that its client gave up."""
    state = make_state()
    ready(state, p0=0, d0=0)
    state.place(make_request("r1"), 0.0)
    other = "d0" if name == "p0" else "p0"
    role: Role = "decode" if name == "p0" else "prefill"
    handle(state, events.LoadReported(report_of(other, role, 2)), now=LEASE_S)
    assert len(handle(state, events.TimePassed(), now=LEASE_S + 0.1)) == 1
    assert state.is_placed(RequestId("r1"), 0)
    assert not state.instances[InstanceId(other)].placed
    records = (gateway_record(), record_of("p0", "prefill"), record_of("d0", "decode"))
    handle(state, events.MembersRead(records), now=LEASE_S + 0.2)
    handle(state, outcome(RequestId("r1"), 0), now=LEASE_S + 0.3)
    assert not state.requests


def test_the_bus_being_away_makes_nobody_gone() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    handle(state, events.BusRestored(), now=100.0)
    assert handle(state, events.TimePassed(), now=100.0 + LEASE_S) == []


def test_a_gateway_is_gone_only_after_a_whole_lease_of_reads_without_it() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    state.place(make_request("r1"), 0.0)
    assert handle(state, events.MembersRead(()), now=50.0) == []
    assert handle(state, events.MembersRead((gateway_record(),)), now=51.0) == []
    assert handle(state, events.MembersRead(()), now=60.0) == []
    assert handle(state, events.MembersRead(()), now=60.0 + LEASE_S + 0.1) == [
        events.AnnounceGatewayGone(GatewayId(GATEWAY))
    ]
    assert not state.requests


def test_a_booking_whose_end_was_never_heard_goes_when_both_instances_report_no_work() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    state.place(make_request("r0"), 0.0)
    handle(state, events.TaskAcknowledged(RequestId("r0"), 0), 1.0)
    handle(state, events.LoadReported(report_of("d0", "decode", 2)), 1.0 + STALE_AFTER_S)
    assert state.is_placed(RequestId("r0"), 0)
    handle(state, events.LoadReported(report_of("d0", "decode", 3)), 1.1 + STALE_AFTER_S)
    assert not state.requests


def test_bookings_whose_ends_were_never_heard_go_though_their_instances_always_have_work() -> None:
    """Of ten, four ends were lost with a connection; two run, the others end as they should."""
    state = make_state()
    ready(state, p0=0, d0=0)
    for number in range(10):
        state.place(make_request(f"r{number}"), 0.0)
        handle(state, events.TaskAcknowledged(RequestId(f"r{number}"), 0), number / 10)
    for number in range(4, 8):
        handle(state, events.RequestOver(RequestId(f"r{number}")))
    busy = msgspec.structs.replace(report_of("d0", "decode", 2), decode_running=1, decode_waiting=1)
    handle(state, events.LoadReported(busy), 1.0)
    state.place(make_request("r10"), 5.9)
    handle(state, events.TaskAcknowledged(RequestId("r10"), 0), 5.9)
    for now in (2.0, 4.0, 6.0):
        for view in state.instances.values():
            view.last_heard_s = now
        handle(state, events.TimePassed(), now)
    assert sorted(state.requests) == ["r10", "r8", "r9"]


def test_lives_that_ended_before_this_scheduler_began_are_told_of_but_not_those_that_are_heard() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    ended = InstanceLife(InstanceId("d0"), Incarnation("i0"))
    unknown = InstanceLife(InstanceId("d9"), Incarnation("i1"))
    heard = InstanceLife(InstanceId("d0"), Incarnation("i1"))
    commands = handle(state, events.DepartedRead((ended, unknown, heard)))
    assert commands == [
        events.AnnounceInstanceGone(InstanceId("d0"), Incarnation("i0"), is_former=True),
        events.AnnounceInstanceGone(InstanceId("d9"), Incarnation("i1"), is_former=True),
    ]
    assert set(state.instances) == {"p0", "d0"}
