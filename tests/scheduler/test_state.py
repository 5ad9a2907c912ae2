"""What the scheduler knows and decides, as events and placements."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ContextLengthExceeded, NoInstanceReady, Overloaded, RequestCancelled, RequestError
from common.ids import Incarnation, InstanceId, RequestId
from common.messages import (
    InstanceLife,
    MemberRecord,
    Placement,
    Role,
)
from scheduler import events
from tests.requests import make_request
from tests.scheduler.states import (
    gateway_record,
    handle,
    make_state,
    ready,
    record_of,
    report_of,
)


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
