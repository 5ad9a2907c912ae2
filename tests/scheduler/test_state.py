"""What the scheduler knows and decides, as events and placements."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import SchedulerConfig
from common.errors import ContextLengthExceeded, NoInstanceReady, Overloaded, RequestCancelled, RequestError
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.messages import (
    InstanceLife,
    InstanceRecord,
    LoadReport,
    MemberRecord,
    Placement,
    Role,
    ServiceRecord,
)
from scheduler import events
from scheduler.state import STALE_AFTER_S, SchedulerState
from tests.load_reports import make_report
from tests.requests import GATEWAY, make_request

LEASE_S = 3.0
ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "m": "mixed"}


def make_state(max_pending: int = 1000, max_requests: int = 100) -> SchedulerState:
    settings = SchedulerConfig(
        max_pending_prefill_tokens=max_pending, max_requests_per_decode=max_requests, decisions_kept=8
    )
    return SchedulerState(lease_s=LEASE_S, settings=settings)


def record_of(
    name: str, role: Role, incarnation: str = "i1", total_blocks: int = 64, largest_pool_blocks: int = 64
) -> InstanceRecord:
    return InstanceRecord(
        instance_id=InstanceId(name),
        incarnation=Incarnation(incarnation),
        role=role,
        model="m",
        host="h",
        pid=1,
        http_url="",
        block_size=16,
        total_blocks=total_blocks,
        largest_pool_blocks=min(total_blocks, largest_pool_blocks),
        context_length=8192,
        dtype="fp32",
    )


def gateway_record(name: str = GATEWAY) -> ServiceRecord:
    return ServiceRecord(
        service_id=name, incarnation=Incarnation("g"), kind="gateway", host="h", pid=1, http_url=""
    )


def report_of(
    name: str,
    role: Role,
    sequence: int = 1,
    *,
    pending: int = 0,
    incarnation: str = "i1",
    draining: bool = False,
    total_blocks: int = 64,
    largest_pool_blocks: int = 64,
) -> LoadReport:
    return make_report(
        name,
        role,
        total_blocks,
        incarnation,
        sequence=sequence,
        is_draining=draining,
        pending_prefill_tokens=pending,
        largest_pool_blocks=min(total_blocks, largest_pool_blocks),
        prefill_tokens_per_s=100.0,
    )


def handle(
    state: SchedulerState, event: events.SchedulerStateEvent, now: float = 0.0
) -> list[events.SchedulerCommand]:
    commands = state.handle(event, now)
    state.check()
    return commands


def ready(state: SchedulerState, **pending: int) -> None:
    """Makes members p0, p1, …, d0, … and m0, … (mixed) known and heard of, with that many pending tokens."""
    records: list[MemberRecord] = [gateway_record()]
    for name in pending:
        records.append(record_of(name, ROLES[name[0]]))
    handle(state, events.MembersRead(tuple(records)))
    for name, tokens in pending.items():
        handle(state, events.LoadReported(report_of(name, ROLES[name[0]], pending=tokens)))


def test_a_prompt_joins_the_shortest_queue_counting_what_was_just_sent() -> None:
    state = make_state()
    ready(state, p0=100, p1=90, d0=0)
    chosen = [state.place(make_request(f"r{i}", 8), 0.0).prefill_instance for i in range(4)]
    assert chosen == ["p1", "p1", "p0", "p1"]


def test_a_report_replaces_what_was_sent_before_it_and_acknowledged() -> None:
    state = make_state()
    ready(state, p0=0, p1=0, d0=0)
    assert state.place(make_request("r1", 50), 0.0).prefill_instance == "p0"
    handle(state, events.TaskAcknowledged(RequestId("r1"), 0))
    handle(state, events.LoadReported(report_of("p0", "prefill", 2, pending=10)))
    assert state.place(make_request("r2", 5), 0.0).prefill_instance == "p1"
    assert state.place(make_request("r3", 20), 0.0).prefill_instance == "p1"
    assert state.place(make_request("r4", 1), 0.0).prefill_instance == "p0"


def test_decode_goes_where_the_smallest_share_of_memory_is_spoken_for() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=0)
    chosen = [
        state.place(make_request(f"r{i}", tokens), 0.0).decode_instance
        for i, tokens in enumerate((50, 20, 20, 20, 20))
    ]
    assert chosen == ["d0", "d1", "d1", "d1", "d0"]
    handle(state, events.RequestOver(RequestId("r0")))
    assert state.place(make_request("r9", 1), 0.0).decode_instance == "d0"


def test_a_resumed_sequence_is_booked_on_the_least_loaded_decode_instance_alone() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=0)
    state.place(make_request("r0", 50), 0.0)
    life = Incarnation("i1")
    for number in range(2):
        placement = state.place_resumed(make_request(f"r{number + 1}", 20, attempt=1), 0.0)
        assert placement == Placement(InstanceId("d1"), life, InstanceId("d1"), life)
        state.check()
    assert state.place(make_request("r3", 1), 0.0).decode_instance == "d1"
    assert state.instances[InstanceId("p0")].placed == {"r0", "r3"}
    with pytest.raises(RequestCancelled):
        state.place_resumed(make_request("r1", 20), 0.0)
    handle(state, events.TaskUndelivered(RequestId("r1"), 1))
    assert state.place(make_request("r1", 20, attempt=1), 0.0).prefill_instance == "p0"
    for number in range(4):
        handle(state, events.RequestOver(RequestId(f"r{number}"), attempt=1))
    assert all(not view.placed for view in state.instances.values())
    handle(state, events.InstanceSuspected(InstanceId("d0")))
    handle(state, events.InstanceSuspected(InstanceId("d1")))
    with pytest.raises(NoInstanceReady, match="no decode instance is ready"):
        state.place_resumed(make_request("r4"), 0.0)


def test_a_running_sequence_that_leaves_is_booked_on_the_least_loaded_other_decode_instance() -> None:
    state = make_state()
    ready(state, p0=0, d0=0, d1=0, d2=0)
    former = InstanceLife(InstanceId("d0"), Incarnation("i1"))
    for number, tokens in enumerate((20, 50)):
        state.place(make_request(f"r{number}", tokens), 0.0)
        handle(state, events.TaskAcknowledged(RequestId(f"r{number}"), 0))
    drawn = make_request("r0", 20, output_ids=(1, 2))
    placement = state.place_moved(drawn, former, 1.0)
    state.check()
    life = Incarnation("i1")
    assert placement == Placement(InstanceId("d0"), life, InstanceId("d2"), life)
    assert state.requests[RequestId("r0")].placement == placement
    assert state.instances[InstanceId("d0")].booked.unreported == 0
    assert state.instances[InstanceId("p0")].placed == {"r1"}
    handle(state, events.RequestOver(RequestId("r0")))
    assert not state.instances[InstanceId("d2")].placed
    # Its end has been heard: asked late, it is booked nowhere.
    assert state.place_moved(drawn, former, 1.0) == placement
    assert RequestId("r0") not in state.requests
    state.check()


def test_a_sequence_that_finds_no_other_instance_keeps_its_booking() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    placement = state.place(make_request("r0"), 0.0)
    handle(state, events.TaskAcknowledged(RequestId("r0"), 0))
    for incarnation, why in (("i1", "no decode instance"), ("i0", "is gone")):
        with pytest.raises(NoInstanceReady, match=why):
            state.place_moved(
                make_request("r0"), InstanceLife(InstanceId("d0"), Incarnation(incarnation)), 0.0
            )
    assert state.requests[RequestId("r0")].placement == placement
    state.check()


def test_a_full_queue_turns_requests_away_with_a_computed_time() -> None:
    state = make_state(max_pending=200)
    ready(state, p0=400, d0=0)
    with pytest.raises(Overloaded, match="max_pending_prefill_tokens") as refused:
        state.place(make_request("r1", 100), 0.0)
    assert refused.value.retry_after_s == pytest.approx((400 + 100 - 200) / 100.0)
    state = make_state(max_requests=1)
    ready(state, p0=0, d0=0)
    state.place(make_request("r1"), 0.0)
    with pytest.raises(Overloaded, match="max_requests_per_decode"):
        state.place(make_request("r2"), 0.0)
    state.check()


def test_what_fits_no_pool_is_refused_for_good_and_names_the_field() -> None:
    state = make_state(max_pending=10_000)
    ready(state, p0=0, d0=0)
    for prompt, output, param in ((1025, 1, "prompt"), (1000, 25, "max_tokens")):
        with pytest.raises(ContextLengthExceeded) as refused:
            state.place(make_request("r1", prompt, output), 0.0)
        assert refused.value.param == param


def test_without_a_ready_instance_of_a_role_there_is_a_typed_refusal() -> None:
    state = make_state()
    with pytest.raises(NoInstanceReady, match="prefill"):
        state.place(make_request(), 0.0)
    ready(state, p0=0, d0=0)
    handle(state, events.LoadReported(report_of("d0", "decode", 2, draining=True)))
    with pytest.raises(NoInstanceReady, match="decode"):
        state.place(make_request(), 0.0)


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


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_no_booking_is_lost_or_kept(seed: int) -> None:
    """A random walk over every event; in the end every request is over and no instance remembers one."""
    chance = random.Random(seed)
    state = make_state(max_pending=120, max_requests=6)
    names = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    placed: dict[RequestId, Placement] = {}
    incarnations = dict.fromkeys(names, 1)
    now = 0.0
    for step in range(150):
        now += chance.random()
        name = chance.choice(sorted(names))
        role: Role = names[name]  # type: ignore[assignment]  # one of the two
        choice = chance.random()
        if choice < 0.4:
            request = make_request(f"r{step}", chance.randint(1, 60))
            place = state.place_resumed if chance.random() < 0.3 else state.place
            try:
                placed[request.request_id] = place(request, now)
            except RequestError:
                assert request.request_id not in state.requests
        elif choice < 0.7:
            incarnation = f"i{incarnations[name]}"
            report = report_of(name, role, step, pending=chance.randint(0, 80), incarnation=incarnation)
            handle(state, events.LoadReported(report), now)
        elif choice < 0.8 and placed:
            request_id = chance.choice(sorted(placed))
            if chance.random() < 0.5:
                handle(state, events.TaskAcknowledged(request_id, 0), now)
            else:
                handle(state, events.TaskUndelivered(request_id, 0), now)
        elif choice < 0.9:
            incarnations[name] += chance.random() < 0.3
            records: list[MemberRecord] = [gateway_record()]
            for each, each_role in names.items():
                record = record_of(each, "prefill", f"i{incarnations[each]}")
                records.append(msgspec.structs.replace(record, role=each_role))
            handle(state, events.MembersRead(tuple(records)), now)
        elif choice < 0.95:
            handle(state, events.TimePassed(), now)
        elif placed:
            handle(state, events.RequestOver(chance.choice(sorted(placed))), now)
        state.check()
    for request_id in placed:
        handle(state, events.RequestOver(request_id), now)
    assert not state.requests
    assert all(not view.placed for view in state.instances.values())


def test_only_instances_whose_kv_lies_alike_are_paired() -> None:
    state = make_state()
    records: list[MemberRecord] = [
        gateway_record(),
        record_of("p0", "prefill"),
        msgspec.structs.replace(record_of("p1", "prefill"), dtype="bf16"),
        msgspec.structs.replace(record_of("d0", "decode"), dtype="bf16"),
    ]
    handle(state, events.MembersRead(tuple(records)))
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        handle(state, events.LoadReported(report_of(name, role)))  # type: ignore[arg-type]
    for number in range(3):
        life = Incarnation("i1")
        placement = Placement(InstanceId("p1"), life, InstanceId("d0"), life)
        assert state.place(make_request(f"r{number}"), 0.0) == placement
    with pytest.raises(NoInstanceReady, match="no prefill instance with a partner's model, dtype"):
        state.place(make_request("r3"), 0.0, frozenset({InstanceId("p1")}))


def test_an_older_attempts_outcome_does_not_touch_the_newer_booking() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    state.place(make_request("r0"), 0.0)
    state.place(msgspec.structs.replace(make_request("r0"), attempt=1), 0.0)
    handle(state, events.TaskUndelivered(RequestId("r0"), 0))
    assert state.is_placed(RequestId("r0"), 1)
    with pytest.raises(RequestCancelled):
        state.place(make_request("r0"), 0.0)
    handle(state, events.TaskUndelivered(RequestId("r0"), 1))
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


def test_a_large_instance_that_is_away_makes_one_wait_instead_of_refusing_for_good() -> None:
    state = make_state()
    records: list[MemberRecord] = [
        gateway_record(),
        record_of("p0", "prefill"),
        record_of("d0", "decode", total_blocks=1),
        record_of("d1", "decode"),
    ]
    handle(state, events.MembersRead(tuple(records)))
    handle(state, events.LoadReported(report_of("p0", "prefill")))
    handle(state, events.LoadReported(report_of("d0", "decode", total_blocks=1)))
    with pytest.raises(NoInstanceReady, match="that holds"):
        state.place(make_request("r0", max_tokens=100), 0.0)


def with_pools(largest_at_start: int, largest_now: int) -> SchedulerState:
    """``d0`` has several pools, of 64 blocks of 16 tokens together."""
    state = make_state()
    record = record_of("d0", "decode", largest_pool_blocks=largest_at_start)
    handle(state, events.MembersRead((gateway_record(), record_of("p0", "prefill"), record)))
    handle(state, events.LoadReported(report_of("p0", "prefill")))
    report = report_of("d0", "decode", largest_pool_blocks=largest_now)
    handle(state, events.LoadReported(report))
    return state


def test_what_fits_an_instances_pools_together_but_none_of_them_is_refused_for_good() -> None:
    state = with_pools(largest_at_start=10, largest_now=10)
    with pytest.raises(ContextLengthExceeded, match="holds 160") as refused:
        state.place(make_request("r0", 100, max_tokens=61), 0.0)
    assert refused.value.param == "max_tokens"
    assert state.place(make_request("r1", 100, max_tokens=60), 0.0).decode_instance == "d0"
    assert not state.instances[InstanceId("d0")].placed & {"r0"}


def test_a_pool_that_has_come_is_used_and_one_that_has_gone_is_waited_for() -> None:
    grown = with_pools(largest_at_start=10, largest_now=20)
    assert grown.place(make_request("r0", 100, max_tokens=200), 0.0).decode_instance == "d0"
    shrunk = with_pools(largest_at_start=20, largest_now=10)
    with pytest.raises(NoInstanceReady, match="that holds 300"):
        shrunk.place(make_request("r0", 100, max_tokens=200), 0.0)


def test_instances_are_balanced_by_all_their_pools_together() -> None:
    state = with_pools(largest_at_start=10, largest_now=10)
    records = (
        *(view.record for view in state.instances.values()),
        record_of("d1", "decode", total_blocks=16),
    )
    handle(state, events.MembersRead(records))
    handle(state, events.LoadReported(report_of("d1", "decode", total_blocks=16)))
    chosen = [state.place(make_request(f"r{number}", 20), 0.0).decode_instance for number in range(5)]
    assert chosen == ["d0", "d1", "d0", "d0", "d0"]


def test_lives_that_ended_before_this_scheduler_began_are_told_of_but_not_those_that_are_heard() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    ended = InstanceLife(InstanceId("d0"), Incarnation("i0"))
    unknown = InstanceLife(InstanceId("d9"), Incarnation("i1"))
    heard = InstanceLife(InstanceId("d0"), Incarnation("i1"))
    commands = handle(state, events.DepartedRead((ended, unknown, heard)))
    assert commands == [
        events.AnnounceInstanceGone(InstanceId("d0"), Incarnation("i0")),
        events.AnnounceInstanceGone(InstanceId("d9"), Incarnation("i1")),
    ]
    assert set(state.instances) == {"p0", "d0"}
