"""How many decisions are judged, what is summed up, and what hindsight compares."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import SchedulerConfig
from common.ids import RequestId
from common.messages import InstanceLife
from common.performance import FittedTime
from scheduler import events
from scheduler.policy.dispatch import DECODE_POLICIES, PREFILL_POLICIES
from scheduler.regret import MOST_SAVED_S, RegretReport, TimeBudget
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, handle, ready, report_of

STEP = FittedTime((2e-3, 1e-3, 0.02), 0.0, 100)
STEPS = st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.01)), max_size=60)


@given(STEPS, st.floats(0, 0.1))
def test_no_more_is_spent_than_its_share_but_for_one_judgement_and_what_was_saved(
    steps: list[tuple[float, float]], share: float
) -> None:
    budget = TimeBudget(share)
    now = spent_s = 0.0
    for waited_s, cost_s in steps:
        now += waited_s
        if budget.may_spend(now):
            budget.spend(cost_s)
            spent_s += cost_s
    dearest_s = max((cost_s for _, cost_s in steps), default=0.0)
    assert spent_s <= share * now + MOST_SAVED_S + dearest_s + 1e-9


def test_with_a_share_of_nothing_nobody_is_judged() -> None:
    budget = TimeBudget(0.0)
    assert not any(budget.may_spend(now) for now in (0.0, 10.0, 1e6))


def measured_state() -> SchedulerState:
    state = SchedulerState(LEASE_S, SchedulerConfig())
    ready(state, p0=0, p1=0, d0=0, d1=0)
    for instance_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        report = report_of(instance_id, role, 9)  # type: ignore[arg-type]  # one of Role's words
        report = msgspec.structs.replace(report, prefill_tokens_per_s=1000.0, step_time=STEP)
        handle(state, events.LoadReported(report))
    return state


def test_what_a_placement_saw_is_judged_for_every_policy_and_summed_up() -> None:
    state = measured_state()
    placer = state.placer
    for number in range(4):
        state.place(make_request(f"r{number}", 500), 0.0)
        assert placer.look is not None
        placer.regret.judge(placer.look)
    report = placer.regret.report("shortest_queue", "least_loaded")
    found = {(each.phase, each.policy): each for each in report.policies}
    assert {each.decisions for each in report.policies} == {4}
    assert len(found) == len(PREFILL_POLICIES) + len(DECODE_POLICIES)
    shortest = found["prefill", "shortest_queue"]
    assert (shortest.regret_s, shortest.best) == (0.0, 4)
    # Queues are 0 and 0, 500 and 0, 500 and 500, 1,000 and 500 tokens; a prompt takes half a second itself.
    assert shortest.cost_s == pytest.approx(0.5 + 0.5 + 1.0 + 1.0)
    assert found["decode", "best_fit"].regret_s > 0


def test_hindsight_compares_what_was_predicted_of_the_choice_taken_with_what_the_client_saw() -> None:
    state = measured_state()
    state.place(make_request("r1", 500), 0.0)
    handle(state, events.RequestOver(RequestId("r1"), 500, 8, ttft_s=0.7, tpot_s=0.020))
    [prefill, decode] = state.placer.regret.report("", "").hindsight
    assert (prefill.phase, prefill.requests) == ("prefill", 1)
    assert (prefill.predicted_s, prefill.measured_s) == (0.5, 0.7)
    assert prefill.error_s == pytest.approx(0.2)
    assert decode.error_s == pytest.approx(decode.predicted_s - 0.020)
    [decision] = state.placer.log.find("r1")
    assert (decision.ttft_s, decision.tpot_s) == (0.7, 0.020)
    assert [choice.predicted_s for choice in decision.choices] == [0.5, decode.predicted_s]


def test_a_later_attempt_and_an_end_without_times_say_nothing_of_predictions() -> None:
    state = measured_state()
    state.place(make_request("again", 500, attempt=1), 0.0)
    handle(state, events.RequestOver(RequestId("again"), 500, 8, ttft_s=0.7, tpot_s=0.020))
    state.place(make_request("left", 500), 0.0)
    handle(state, events.RequestOver(RequestId("left"), 500, None))
    state.place(make_request("one", 500), 0.0)
    handle(state, events.RequestOver(RequestId("one"), 500, 1, ttft_s=0.7))
    assert [(each.phase, each.requests) for each in state.placer.regret.report("", "").hindsight] == [
        ("prefill", 1)
    ]


def test_who_was_moved_as_it_ran_says_nothing_of_what_was_predicted_where_it_ended() -> None:
    state = measured_state()
    placed = state.place(make_request("r1", 500), 0.0)
    handle(state, events.TaskAcknowledged(RequestId("r1"), 0))
    drawn = make_request("r1", 500, output_ids=(1, 2, 3))
    state.place_moved(drawn, InstanceLife(placed.decode_instance, placed.decode_incarnation), 1.0)
    handle(state, events.RequestOver(RequestId("r1"), 500, 8, ttft_s=0.7, tpot_s=0.020))
    assert [each.phase for each in state.placer.regret.report("", "").hindsight] == ["prefill"]


def test_a_report_reads_back_as_it_was_written_after_a_single_decision() -> None:
    state = measured_state()
    state.place(make_request("r0", 500), 0.0)
    assert state.placer.look is not None
    state.placer.regret.judge(state.placer.look)
    report = state.placer.regret.report("shortest_queue", "least_loaded")
    assert msgspec.json.decode(msgspec.json.encode(report), type=RegretReport) == report
