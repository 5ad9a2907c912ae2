"""What other rules would have cost: worked examples, and what must hold for anybody's choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.ids import InstanceId
from common.lengths import certain
from common.performance import FittedTime
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives, PrefillCandidate
from scheduler.policy.dispatch import DECODE_POLICIES, PREFILL_POLICIES
from scheduler.policy.shadow import Look, judge_policies, predicted_tpot_s, predicted_ttft_s

OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.1)
ARRIVAL = Arrival(number=0, salt=7, prompt_tokens=1000, drawn_tokens=0, lengths=certain(100))
STEP = FittedTime((2e-3, 1e-3, 0.02), 0.0, 100)
"""20 ms, 1 ms a sequence, 2 ms per thousand tokens of context."""

INSTANCES = st.integers(0, 9).map(lambda number: InstanceId(f"i{number}"))
PREFILLS = st.lists(
    st.builds(
        PrefillCandidate,
        INSTANCES,
        st.integers(0, 50_000),
        st.integers(0, 50),
        st.none() | st.floats(1.0, 1e5),
        st.none() | st.just(FittedTime((1.0, 0.5, 0.01), 0.0, 9)),
    ),
    max_size=6,
    unique_by=lambda each: each.instance_id,
)
DECODES = st.lists(
    st.builds(
        DecodeCandidate,
        INSTANCES,
        st.integers(0, 200),
        st.integers(0, 100_000),
        st.integers(1, 100_000),
        st.floats(0, 1e5),
        st.just(0),
        st.none() | st.builds(FittedTime, st.tuples(*[st.floats(0, 0.1)] * 3), st.just(0.0), st.just(9)),
    ),
    max_size=6,
    unique_by=lambda each: each.instance_id,
)


def test_a_first_token_waits_for_the_queue_and_then_for_its_own_prompt() -> None:
    queued = PrefillCandidate(InstanceId("p"), 5000, tokens_per_s=1000.0)
    assert predicted_ttft_s(queued, ARRIVAL) == pytest.approx(6.0)
    law = FittedTime((1.0, 0.5, 0.01), 0.0, 9)
    lawful = PrefillCandidate(InstanceId("p"), 5000, tokens_per_s=1000.0, chunk_time=law)
    assert predicted_ttft_s(lawful, ARRIVAL) == pytest.approx(
        (5.0 + 10 * 0.01) + (1.0 + 0.5 * 0.4995 + 2 * 0.01)
    )
    in_shorter_chunks = replace(lawful, chunk_tokens=100)
    assert predicted_ttft_s(in_shorter_chunks, ARRIVAL) == pytest.approx(
        (5.0 + 50 * 0.01) + (1.0 + 0.5 * 0.4995 + 10 * 0.01)
    )
    assert predicted_ttft_s(PrefillCandidate(InstanceId("p"), 0), ARRIVAL) is None


def test_a_token_takes_a_step_with_the_request_in_it_and_longer_where_the_pool_overflows() -> None:
    roomy = DecodeCandidate(InstanceId("d"), 9, 4000, 1 << 20, 900.0, step_time=STEP)
    step_s = 0.02 + 10 * 1e-3 + 5.5 * 2e-3
    assert predicted_tpot_s(roomy, ARRIVAL) == pytest.approx(step_s)
    tight = DecodeCandidate(InstanceId("d"), 9, 4000, 3000, 900.0, step_time=STEP)
    assert predicted_tpot_s(tight, ARRIVAL) == pytest.approx(step_s * 2)
    assert predicted_tpot_s(DecodeCandidate(InstanceId("d"), 9, 4000, 3000), ARRIVAL) is None


def test_each_rule_is_charged_what_its_own_choice_costs_over_the_best() -> None:
    prefills = [
        PrefillCandidate(InstanceId("a"), 3000, requests=1, tokens_per_s=1000.0),
        PrefillCandidate(InstanceId("b"), 0, requests=2, tokens_per_s=1000.0),
        PrefillCandidate(InstanceId("new"), 0, requests=0),
    ]
    regrets = judge_policies(Look(ARRIVAL, prefills, objectives=OBJECTIVES))
    found = {each.policy: (each.cost_s, each.regret_s) for each in regrets}
    assert found == {
        "round_robin": (4.0, 3.0),
        "least_outstanding": (4.0, 3.0),
        "shortest_queue": (1.0, 0.0),
        "token_jsq": (1.0, 0.0),
        "best_fit": (4.0, 3.0),
        "deferred": (1.0, 0.0),
    }


@given(PREFILLS, DECODES, st.integers(0, 1 << 63), st.integers(0, 9))
def test_no_rule_does_better_than_the_best_choice_and_whoever_makes_it_regrets_nothing(
    prefills: list[PrefillCandidate], decodes: list[DecodeCandidate], salt: int, number: int
) -> None:
    arrival = Arrival(number, salt, 300, 0, certain(50))
    regrets = judge_policies(Look(arrival, prefills, decodes, OBJECTIVES))
    costs = {
        "prefill": [cost for each in prefills if (cost := predicted_ttft_s(each, arrival)) is not None],
        "decode": [cost for each in decodes if (cost := predicted_tpot_s(each, arrival)) is not None],
    }
    judged = [*(PREFILL_POLICIES if costs["prefill"] else ()), *(DECODE_POLICIES if costs["decode"] else ())]
    assert [each.policy for each in regrets] == judged
    for each in regrets:
        best_s = min(costs[each.phase])
        assert each.regret_s >= 0
        assert each.regret_s == each.cost_s - best_s
        assert (each.regret_s == 0) == (each.cost_s == best_s)
        assert each.cost_s in costs[each.phase]
