"""Who is chosen by the configured rules, by what the mesh has learned, and what is kept of every choice."""

import msgspec
import pytest

from common.config import ObjectivesConfig, SchedulerConfig
from common.errors import Overloaded
from common.ids import InstanceId, RequestId
from common.performance import FittedTime
from scheduler import events
from scheduler.decision_log import MOST_FORMER, Choice, Decision, DecisionLog, Former
from scheduler.policy.worker_counts import mean_fit
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, handle, ready, record_of, report_of

STEP = FittedTime((2e-3, 1e-3, 0.02), 0.0, 100)


def state_of(settings: SchedulerConfig, tpot_s: float = 0.1) -> SchedulerState:
    state = SchedulerState(LEASE_S, settings, ObjectivesConfig(tpot_s=tpot_s))
    ready(state, p0=0, p1=0, d0=0, d1=0)
    return state


def test_the_configured_rules_choose() -> None:
    state = state_of(SchedulerConfig(prefill_policy="round_robin", decode_policy="best_fit"))
    placements = [state.place(make_request(f"r{each}", 10), 0.0) for each in range(4)]
    assert [each.prefill_instance for each in placements] == ["p0", "p1", "p0", "p1"]
    assert {each.decode_instance for each in placements} == {"d0"}


def test_best_fit_goes_by_what_an_instance_has_learned_of_its_steps() -> None:
    """40 ms allow d0 a batch of 18 by what it has measured."""
    state = state_of(SchedulerConfig(decode_policy="best_fit"), tpot_s=0.04)
    report = msgspec.structs.replace(report_of("d0", "decode", 9), step_time=STEP)
    handle(state, events.LoadReported(report))
    chosen = [str(state.place(make_request(f"r{each}", 1), 0.0).decode_instance) for each in range(25)]
    assert chosen == ["d0"] * chosen.count("d0") + ["d1"] * chosen.count("d1")
    assert 10 < chosen.count("d0") < 20
    [decision] = state.placer.log.find("r24")
    refused = {each.instance_id: each.refusal for each in decision.choices[1].candidates}
    assert str(refused[InstanceId("d0")]).startswith("(b)")


def test_best_fit_keeps_what_is_promised_to_the_requests_class() -> None:
    relaxed = {"batch": ObjectivesConfig(tpot_s=1.0)}
    state = SchedulerState(
        LEASE_S, SchedulerConfig(decode_policy="best_fit"), ObjectivesConfig(tpot_s=0.022), relaxed
    )
    ready(state, p0=0, d0=0, d1=0)
    for number, instance_id in enumerate(("d0", "d1")):
        report = msgspec.structs.replace(report_of(instance_id, "decode", 9), step_time=STEP)
        handle(state, events.LoadReported(report))
        strict = state.place(make_request(f"strict{number}", 1), 0.0)
        assert strict.decode_instance == instance_id
    batch = msgspec.structs.replace(make_request("batch", 900), service_class="batch")
    state.place(batch, 0.0)
    [[_, strict_choice], [_, batch_choice]] = (
        state.placer.log.find(each)[0].choices for each in ("strict1", "batch")
    )
    assert str(strict_choice.candidates[0].refusal).startswith("(b)")
    assert [each.refusal for each in batch_choice.candidates] == [None, None]


def test_what_ended_says_what_is_to_be_expected() -> None:
    state = state_of(SchedulerConfig())
    for number in range(40):
        state.place(make_request(f"r{number}", 30, max_tokens=900), 0.0)
        handle(state, events.RequestOver(RequestId(f"r{number}"), 30, 200))
    handle(state, events.RequestOver(RequestId("left"), 30, None))
    assert state.placer.predict(make_request("r", 30, max_tokens=900)).mean == pytest.approx(200)
    assert state.placer.predict(make_request("r", 30, max_tokens=50)).mean == 50
    begun = make_request("r", 30, max_tokens=900, output_ids=(1,) * 150)
    assert state.placer.predict(begun).mean == pytest.approx(200)
    outlived = make_request("r", 30, max_tokens=900, output_ids=(1,) * 300)
    assert state.placer.predict(outlived).mean == 301


def test_a_choice_is_kept_with_its_outcome_and_so_is_a_refusal() -> None:
    state = state_of(SchedulerConfig(max_requests_per_decode=1))
    for number in range(2):
        state.place(make_request(f"r{number}", 5), float(number))
    with pytest.raises(Overloaded):
        state.place(make_request("r2", 5), 2.0)
    handle(state, events.RequestOver(RequestId("r1"), 5, 7))
    newest = state.placer.log.newest(2)
    assert [(each.request_id, each.at_s, each.output_tokens) for each in newest] == [
        ("r2", 2.0, None),
        ("r1", 1.0, 7),
    ]
    assert newest[0].choices[1].taken is None
    assert "scheduler.max_requests_per_decode = 1" in str(newest[0].choices[1].reason)


def test_who_ended_early_is_known_to_be_over_until_it_is_placed_again() -> None:
    state = state_of(SchedulerConfig())
    state.place(make_request("r1"), 0.0)
    state.place(make_request("r2"), 0.0)

    def over() -> dict[str, bool]:
        return {each.request_id: each.is_over for each in state.placer.log.newest(9)}

    assert over() == {"r1": False, "r2": False}
    handle(state, events.RequestOver(RequestId("r1"), 5, None))
    assert over() == {"r1": True, "r2": False}
    state.place(make_request("r2", attempt=1), 0.0)
    # The former attempt's end, which comes late.
    handle(state, events.RequestOver(RequestId("r2"), attempt=0))
    assert over() == {"r1": True, "r2": False}
    handle(state, events.RequestOver(RequestId("r2"), attempt=1))
    assert over() == {"r1": True, "r2": True}
    state.place(make_request("r2", attempt=2), 0.0)
    assert not over()["r2"]


def test_who_was_no_candidate_is_named_beside_them_with_the_reason() -> None:
    state = state_of(SchedulerConfig(max_pending_prefill_tokens=100))
    names: dict[str, dict[str, object]] = {
        "d2": {"is_draining": True},
        "d3": {"largest_pool_blocks": 1},
        "d4": {},
        "d5": {},
    }
    records = [view.record for view in state.instances.values()]
    records += [record_of(each, "decode") for each in names] + [record_of("p2", "prefill")]
    handle(state, events.MembersRead(tuple(records)))
    for name, load in names.items():
        if name != "d5":
            report = msgspec.structs.replace(report_of(name, "decode"), **load)
            handle(state, events.LoadReported(report))
    handle(state, events.LoadReported(report_of("p2", "prefill", pending=99)))
    handle(state, events.InstanceSuspected(InstanceId("d4")))
    state.place(make_request("r1", 20), 0.0)
    [decision] = state.placer.log.find("r1")
    barred = [{each.instance_id: each.reason for each in choice.barred} for choice in decision.choices]
    assert barred[0] == {"p2": "99 prompt tokens wait there, over a bound of the scheduler's"}
    assert barred[1] == {
        "d2": "drains",
        "d3": "holds 16 tokens of a sequence, of 28",
        "d4": "did not answer, and was not heard of since",
        "d5": "has not reported yet",
    }


def test_decisions_are_found_by_their_class_and_by_who_was_looked_at() -> None:
    state = state_of(SchedulerConfig())
    for number, service_class in enumerate(("default", "batch", "default", "batch")):
        request = msgspec.structs.replace(make_request(f"r{number}", 5), service_class=service_class)
        excluded = frozenset({InstanceId("d1")} if number < 2 else ())
        state.place(request, float(number), excluded)
    log = state.placer.log

    def newest(count: int, *wanted: str | None) -> list[str]:
        return [each.request_id for each in log.newest(count, *wanted)]

    assert newest(9, "batch") == ["r3", "r1"]
    assert newest(1, "batch") == ["r3"]
    assert newest(9, None, "d1") == ["r3", "r2"]
    assert newest(9, "default", "d1") == ["r2"]
    assert newest(9, None, "nobody") == []


def test_only_the_newest_are_kept() -> None:
    log = DecisionLog(3)
    for number in (0, 1, 2, 0, 3):
        log.add(Decision(RequestId(f"{number}a"), 0, 0.0, 1, 1.0))
    assert [each.request_id for each in log.newest(9)] == ["3a", "0a", "2a"]
    assert log.find("1a") == []
    log.add(Decision(RequestId("3a-1"), 0, 0.0, 1, 1.0))
    assert [each.request_id for each in log.find("3a")] == ["3a", "3a-1"]


def placed(attempt: int, prefill: str | None = None, decode: str | None = None) -> Decision:
    """Of one request; None: no choice of that phase; "": it took nobody."""
    choices = []
    if prefill is not None:
        choices.append(Choice("prefill", "first", (), InstanceId(prefill) or None))
    if decode is not None:
        choices.append(Choice("decode", "first", (), InstanceId(decode) or None))
    return Decision(RequestId("1a"), attempt, 0.0, 1, 1.0, tuple(choices))


def test_where_a_request_was_to_be_before_it_was_placed_anew_stays_known() -> None:
    log = DecisionLog(3)

    def kept(decision: Decision) -> tuple[InstanceId | None, InstanceId | None, list[Former]]:
        log.add(decision)
        [found] = log.find("1a")
        return found.taken("prefill"), found.taken("decode"), list(found.former)

    # Where it decodes may be chosen later.
    assert kept(placed(0, "p0")) == ("p0", None, [])
    assert kept(placed(0, None, "d0")) == ("p0", "d0", [])
    # It is to move, and nobody has room: it stays.
    assert kept(placed(0, None, "")) == ("p0", "d0", [])
    # It moves.
    moved = Former(0, InstanceId("p0"), InstanceId("d0"))
    log.note_wait(RequestId("1a"), 0, 2.5)
    log.note_wait(RequestId("1a"), 1, 7.5)
    assert kept(placed(0, None, "d1")) == ("p0", "d1", [moved])
    assert log.find("1a")[0].waited_s == 2.5, "until it was placed at first"
    # It breaks, and goes on elsewhere.
    broken = Former(0, InstanceId("p0"), InstanceId("d1"))
    assert kept(placed(1, "p1", "d2")) == ("p1", "d2", [moved, broken])
    assert log.find("1a")[0].waited_s == 0
    # It is offered to one in vain, and nobody else is there.
    once, refused = (Former(attempt, InstanceId("p1"), InstanceId("d2")) for attempt in (1, 2))
    assert kept(placed(2, "p1", "d2"))[2] == [moved, broken, once]
    assert kept(placed(2, "", None)) == (None, None, [moved, broken, once, refused])
    for attempt in range(3, 20):
        *_, former = kept(placed(attempt, "p1", "d2"))
    assert [each.attempt for each in former] == list(range(19 - MOST_FORMER, 19))
    log.end(RequestId("1a"), 5, 0.1, 0.2)
    assert len(log.find("1a")[0].former) == MOST_FORMER


def test_a_decision_goes_by_the_newest_report_and_bookings() -> None:
    """What a decision looks at is kept between decisions: nothing that changed may be missed."""
    state = state_of(SchedulerConfig())
    state.place(make_request("r0", 10), 0.0)
    handle(state, events.LoadReported(msgspec.structs.replace(report_of("d1", "decode", 9), decode_tokens=5)))
    assert state.place(make_request("r1", 10), 0.0).decode_instance == "d1"
    handle(state, events.LoadReported(report_of("p1", "prefill", 9, pending=50)))
    assert state.place(make_request("r3", 10), 0.0).prefill_instance == "p0"
    handle(state, events.RequestOver(RequestId("r1"), 10, None))
    handle(state, events.LoadReported(report_of("d1", "decode", 10)))
    assert state.place(make_request("r3", 10), 0.0).decode_instance == "d1"


def test_a_long_output_fits_beside_a_long_prompt_that_is_over_before_it_has_grown() -> None:
    """Their ends add up to 1,076 tokens of KV; d0 has 1,024, and needs 840 at once (Aladdin, Fig. 3)."""
    state = state_of(SchedulerConfig(decode_policy="best_fit"))
    long_prompt, long_output = make_request("r0", 700, max_tokens=20), make_request("r1", 100, max_tokens=300)
    assert state.place(long_prompt, 0.0).decode_instance == "d0"
    assert state.place(long_output, 0.0).decode_instance == "d0"
    assert state.place(make_request("r2", 100, max_tokens=300), 0.0).decode_instance == "d0"
    assert state.place(make_request("r3", 700, max_tokens=20), 0.0).decode_instance == "d1"
    state.check()


@pytest.mark.parametrize(
    ("settings", "are_judged", "is_asked"),
    [
        (SchedulerConfig(), True, True),
        (SchedulerConfig(), False, False),
        (SchedulerConfig(decode_policy="best_fit"), False, True),
        (SchedulerConfig(prefill_policy="best_fit"), False, True),
    ],
)
def test_each_of_an_instance_s_sequences_is_looked_at_where_a_rule_asks(
    settings: SchedulerConfig, are_judged: bool, is_asked: bool
) -> None:
    state = SchedulerState(LEASE_S, settings, are_rules_judged=are_judged)
    ready(state, p0=0, d0=0)
    state.place(make_request("r0", 700, max_tokens=20), 0.0)
    state.check()
    [_, decode] = state.placer.log.find("r0")[0].choices
    assert decode.loads[0].sequences is None, "its pool was empty"
    there = state.instances[InstanceId("d0")].for_decode
    assert there.context_tokens == 700
    assert there.sequences == (((700.0, 20.0),) if is_asked else None)


CHUNK = FittedTime((2.0, 1.0, 0.1), 0.0, 100)
"""2 s a thousand tokens, 0.1 s a chunk."""


def test_a_queue_is_bounded_in_seconds_where_its_instance_has_learned_its_speed() -> None:
    """4,096 tokens wait at p0, eight chunks of 1.124 s, before that is known and after."""
    state = SchedulerState(LEASE_S, SchedulerConfig(max_prefill_wait_s=5.0))
    ready(state, p0=4096, d0=0)
    assert state.place(make_request("r0", 10), 0.0).prefill_instance == "p0"
    handle(state, events.RequestOver(RequestId("r0"), 10, None))
    learned = msgspec.structs.replace(report_of("p0", "prefill", 9, pending=4096), chunk_time=CHUNK)
    handle(state, events.LoadReported(learned))
    with pytest.raises(Overloaded, match=r"9\.0 s of work.*max_prefill_wait_s is 5") as refused:
        state.place(make_request("r1", 10), 0.0)
    assert refused.value.retry_after_s == pytest.approx(8 * 1.124 - 5.0)
    shorter = msgspec.structs.replace(
        report_of("p0", "prefill", 10, pending=2048), chunk_time=CHUNK, chunk_tokens=128
    )
    handle(state, events.LoadReported(shorter))
    with pytest.raises(Overloaded, match=r"5\.7 s of work"):
        state.place(make_request("r2", 10), 0.0)
    learned = msgspec.structs.replace(report_of("p0", "prefill", 11, pending=2048), chunk_time=CHUNK)
    handle(state, events.LoadReported(learned))
    assert state.place(make_request("r3", 10), 0.0).prefill_instance == "p0"


def test_who_finds_every_decode_instance_full_is_told_when_the_first_sequence_is_expected_to_end() -> None:
    state = SchedulerState(LEASE_S, SchedulerConfig(max_requests_per_decode=1))
    ready(state, p0=0, d0=0)
    learned = msgspec.structs.replace(
        report_of("d0", "decode", 9), step_time=FittedTime((0.0, 0.0, 0.25), 0.0, 100)
    )
    handle(state, events.LoadReported(learned))
    state.place(make_request("r0", 10, max_tokens=40), 0.0)
    expected = state.instances[InstanceId("d0")].for_decode.coming_tokens
    assert expected > 4
    with pytest.raises(Overloaded, match="max_requests_per_decode = 1") as refused:
        state.place(make_request("r1", 10), 0.0)
    assert refused.value.retry_after_s == pytest.approx(expected * 0.25)


def test_a_fresh_instance_is_as_fast_as_its_like() -> None:
    state = SchedulerState(LEASE_S, SchedulerConfig())
    ready(state, p0=0, d0=0)
    learned = msgspec.structs.replace(report_of("d0", "decode", 9), chunk_time=CHUNK, step_time=STEP)
    handle(state, events.LoadReported(learned))
    ready(state, p1=0)
    assert state.instances[InstanceId("p1")].for_prefill.chunk_time == CHUNK
    assert state.instances[InstanceId("p1")].for_decode.step_time == STEP
    other = msgspec.structs.replace(record_of("p2", "prefill"), device="cuda")
    handle(state, events.MembersRead((other,)))
    handle(state, events.LoadReported(report_of("p2", "prefill")))
    assert state.instances[InstanceId("p2")].for_prefill.chunk_time is None


def test_a_profile_counts_until_an_instance_or_its_like_has_learned_more() -> None:
    """It is of no samples, was measured of a machine that did nothing else, and nobody scales by it."""
    state = SchedulerState(LEASE_S, SchedulerConfig())
    ready(state, p0=0, p1=0, d0=0)
    profiled = msgspec.structs.replace(CHUNK, coefficients=(0.5, 0.1, 0.01), samples=0)
    for name in ("p0", "p1"):
        told = msgspec.structs.replace(report_of(name, "prefill", 9), chunk_time=profiled)
        handle(state, events.LoadReported(told))
        assert state.instances[InstanceId(name)].for_prefill.chunk_time == profiled
    assert mean_fit([profiled, profiled]) is None
    learned = msgspec.structs.replace(report_of("p0", "prefill", 10), chunk_time=CHUNK)
    handle(state, events.LoadReported(learned))
    told = msgspec.structs.replace(report_of("p1", "prefill", 10), chunk_time=profiled)
    handle(state, events.LoadReported(told))
    assert state.instances[InstanceId("p0")].for_prefill.chunk_time == CHUNK
    assert state.instances[InstanceId("p1")].for_prefill.chunk_time == CHUNK
