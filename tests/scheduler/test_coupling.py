"""Prompts on mixed instances are decoded there, unless that is refused or another one is much better."""

import msgspec
import pytest

from common.config import DecodePolicy, SchedulerConfig
from common.errors import ContextLengthExceeded, Overloaded
from common.ids import Incarnation, InstanceId
from common.messages import InstanceLife
from scheduler import events
from scheduler.barring import STAYS_AT_HOME, barred_of
from scheduler.policy.candidates import Scored
from scheduler.policy.coupling import STAYS, choose_coupled
from scheduler.policy.dispatch import DECODE_POLICIES
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, gateway_record, handle, ready, record_of, report_of

HOME, OTHER = InstanceId("m0"), InstanceId("d0")


def state_of(settings: SchedulerConfig | None = None, **pending: int) -> SchedulerState:
    state = SchedulerState(LEASE_S, settings or SchedulerConfig())
    ready(state, **pending)
    return state


def place(state: SchedulerState, name: str, prompt_tokens: int = 10) -> tuple[str, str]:
    placement = state.place(make_request(name, prompt_tokens), 0.0)
    state.check()
    return str(placement.prefill_instance), str(placement.decode_instance)


@pytest.mark.parametrize("policy", DECODE_POLICIES)
def test_among_mixed_instances_alone_all_are_decoded_where_they_are_computed(policy: DecodePolicy) -> None:
    state = state_of(SchedulerConfig(decode_policy=policy), m0=0, m1=0, m2=0)
    placed = [place(state, f"r{number}") for number in range(9)]
    assert all(prefill == decode for prefill, decode in placed)
    assert sorted(prefill for prefill, _ in placed) == [f"m{number // 3}" for number in range(9)]


def test_of_the_others_it_is_said_why_they_were_not_scored_as_they_are_at_that_moment() -> None:
    state = state_of(m0=0, m1=5000, m2=9000)

    def barred(name: str) -> dict[str, str]:
        assert place(state, name) == ("m0", "m0")
        [decision] = state.placer.log.find(name)
        return {str(each.instance_id): each.reason for each in decision.choices[1].barred}

    assert barred("r0") == barred("r1") == {"m1": STAYS_AT_HOME, "m2": STAYS_AT_HOME}
    draining = msgspec.structs.replace(report_of("m2", "mixed", 2, pending=9000), is_draining=True)
    handle(state, events.LoadReported(draining))
    assert barred("r2") == {"m1": STAYS_AT_HOME, "m2": "drains"}
    handle(state, events.LoadReported(msgspec.structs.replace(draining, sequence=3, is_draining=False)))
    assert barred("r3") == {"m1": STAYS_AT_HOME, "m2": STAYS_AT_HOME}


def test_they_are_those_that_are_there_whoever_computes_the_prompt() -> None:
    """The same that is found by looking at each of them."""
    state = state_of(m0=0, m1=900, m2=900)
    names = ("m0", "m1", "m2")

    def tell(name: str, sequence: int, pending: int) -> None:
        handle(state, events.LoadReported(report_of(name, "mixed", sequence, pending=pending)))

    def barred(request: str) -> tuple[str, list[str]]:
        home = place(state, request)[1]
        [decision] = state.placer.log.find(request)
        told = decision.choices[1].barred
        members = [state.instances[InstanceId(name)] for name in names]
        found = barred_of("decode", members, {InstanceId(home)}, 1, (), 512, {}, InstanceId(home))
        assert told == found
        return home, [each.instance_id for each in told]

    assert barred("r0") == ("m0", ["m1", "m2"])
    tell("m0", 2, 900)
    tell("m1", 2, 0)
    assert barred("r1") == ("m1", ["m0", "m2"])
    names = ("m0", "m1", "m3")
    records = tuple(record_of(name, "mixed") for name in names)
    handle(state, events.MembersRead((gateway_record(), *records)))
    gone = LEASE_S + 1
    for name in names:
        report = report_of(name, "mixed", 3, pending=0 if name == "m3" else 5000)
        state.handle(events.LoadReported(report), gone)
    state.handle(events.TimePassed(), gone)
    assert "m2" not in state.instances
    assert barred("r2") == ("m3", ["m0", "m1"])


def test_a_mixed_instance_that_is_full_is_told_as_others_of_its_kind_are() -> None:
    state = state_of(SchedulerConfig(max_requests_per_decode=1), m0=0, m1=0, p0=9_000)
    assert place(state, "r0") == ("m0", "m0")
    assert place(state, "r1") == ("m1", "m1")
    handle(state, events.RequestOver(make_request("r0").request_id, 5))
    assert place(state, "r2") == ("m0", "m0")
    [decision] = state.placer.log.find("r2")
    assert {each.instance_id: each.reason for each in decision.choices[1].barred} == {"m1": STAYS_AT_HOME}


def test_what_is_to_be_drawn_counts_where_a_prompt_finds_nobody_waiting() -> None:
    """Else the first of them would compute and decode all that come one at a time."""
    state = state_of(m0=0, m1=0)
    state.place(make_request("r0", 10), 0.0)
    report = msgspec.structs.replace(report_of("m0", "mixed", 2), decode_running=1, decode_tokens=11)
    handle(state, events.TaskAcknowledged(make_request("r0").request_id, 0))
    handle(state, events.LoadReported(report))
    assert place(state, "r1") == ("m1", "m1")


def test_a_mixed_instance_s_prompt_goes_to_a_much_emptier_decode_instance_but_to_no_mixed_one() -> None:
    state = state_of(p0=900, m0=0, m1=800, d0=0)
    assert place(state, "r0") == ("m0", "m0")
    [decision] = state.placer.log.find("r0")
    notes = {each.instance_id: each.note for each in decision.choices[1].candidates}
    assert notes == {HOME: STAYS, OTHER: None}
    busy = msgspec.structs.replace(report_of("m0", "mixed", 2), decode_running=9, decode_tokens=700)
    handle(state, events.LoadReported(busy))
    assert place(state, "r1") == ("m0", "d0")


def test_a_prefill_instance_s_prompts_are_decoded_by_mixed_ones_as_by_others() -> None:
    state = state_of(p0=0, m0=500, d0=0)
    assert {place(state, f"r{number}", 100) for number in range(2)} == {("p0", "d0"), ("p0", "m0")}


def test_a_mixed_instance_that_cannot_decode_the_sequence_does_not_compute_its_prompt() -> None:
    state = state_of(SchedulerConfig(max_requests_per_decode=1), m0=0, m1=0)
    assert [place(state, f"r{number}")[0] for number in range(2)] == ["m0", "m1"]
    with pytest.raises(Overloaded, match="max_requests_per_decode"):
        place(state, "r2")
    state = state_of()
    small = record_of("m0", "mixed", total_blocks=2)
    handle(state, events.MembersRead((small,)))
    handle(state, events.LoadReported(report_of("m0", "mixed", total_blocks=2)))
    with pytest.raises(ContextLengthExceeded):
        state.place(make_request("r0", 10, max_tokens=30), 0.0)
    handle(state, events.MembersRead((small, record_of("m1", "mixed"))))
    handle(state, events.LoadReported(report_of("m1", "mixed", pending=500)))
    assert state.place(make_request("r0", 10, max_tokens=30), 0.0).prefill_instance == "m1"


def test_what_a_mixed_instance_computed_for_one_that_refuses_it_may_be_decoded_there() -> None:
    state = state_of(m0=0, m1=0, d0=0)
    request = make_request("r0", 10, output_ids=(7,))
    former = InstanceLife(HOME, Incarnation("i1"))
    assert state.place_moved(request, former, 0.0).decode_instance == HOME
    busy = msgspec.structs.replace(report_of("m0", "mixed", 2), decode_running=9, decode_tokens=700)
    handle(state, events.LoadReported(busy))
    assert state.place_moved(request, former, 0.0).decode_instance == OTHER


def test_home_is_left_only_where_it_is_refused_or_another_score_is_less_by_a_transfer_s_worth() -> None:
    def chosen(own: Scored, score: float, policy: DecodePolicy) -> InstanceId | None:
        taken = choose_coupled([own, Scored(OTHER, score)], HOME, policy)
        return None if taken is None else taken.instance_id

    assert chosen(Scored(HOME, 5.0), 4.0, "least_outstanding") == HOME
    assert chosen(Scored(HOME, 5.0), 3.9, "least_outstanding") == OTHER
    assert chosen(Scored(HOME, 5.0), 0.0, "round_robin") == HOME
    assert chosen(Scored(HOME, 0.0, "(b) too slow"), 9.0, "best_fit") == OTHER
    assert choose_coupled([Scored(HOME, 0.0, "no")], HOME, "best_fit") is None
