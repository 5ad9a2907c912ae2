"""Best fit against the program that it approximates (Aladdin, 4.2), by the paper's figure and by any case.

Figure 3 gives: four requests in arrival order, two workers with a KV capacity of 9, one token taking 1; JSQ
puts the two long prompts on one worker and the two long outputs on the other, whose most demands are 10
each; the best placement puts one of each on each worker, with 7 each. The lengths are only in the picture,
and are assumed: if requests of a kind are equal, twice a whole one is 10, so that it is 5; a long prompt
beside a long output peaks at the former's end, with its own 5, the other's prompt and as many drawn tokens, 7
in all. So the long prompt has 4 and draws 1, the long output has 1 and draws 4. JSQ places by turns here, and
puts like beside like: so kinds take turns.
"""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ObjectivesConfig, SchedulerConfig
from common.ids import InstanceId
from common.lengths import certain
from common.performance import FittedTime
from scheduler.decision_log import Decision
from scheduler.policy.best_fit import Growth, peak_tokens
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives
from scheduler.policy.dispatch import DECODE_POLICIES, choose
from scheduler.state import SchedulerState
from services.explaining.exact_placement import Worker, place_exactly
from services.explaining.exactness import compare_exactly, describe_each, describe_exactness
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, ready

LONG_PROMPT, LONG_OUTPUT = (4.0, 1.0), (1.0, 4.0)
FIGURE_3 = (LONG_PROMPT, LONG_OUTPUT, LONG_PROMPT, LONG_OUTPUT)
STEP = FittedTime((20.0, 1e-2, 0.02), 0.0, 100)
"""20 ms a token of context, 10 ms a sequence, 20 ms a step."""
TPOT_S = 0.5


def empty(count: int, capacity_tokens: int, step_time: FittedTime | None = None) -> list[DecodeCandidate]:
    return [
        DecodeCandidate(InstanceId(f"d{index}"), 0, 0, capacity_tokens, 0.0, 0, step_time, ())
        for index in range(count)
    ]


def with_one_more(load: DecodeCandidate, request: Growth) -> DecodeCandidate:
    assert load.sequences is not None
    return msgspec.structs.replace(
        load,
        requests=load.requests + 1,
        context_tokens=load.context_tokens + int(request[0]),
        coming_tokens=load.coming_tokens + request[1],
        sequences=(*load.sequences, request),
    )


def placed_by(
    policy: str, loads: list[DecodeCandidate], requests: tuple[Growth, ...]
) -> tuple[list[DecodeCandidate], bool]:
    """The loads afterwards, and whether every request found somebody who keeps what is promised."""
    after, is_kept = {load.instance_id: load for load in loads}, True
    for number, request in enumerate(requests):
        arrival = Arrival(number, number, int(request[0]), 0, certain(int(request[1])))
        rule = DECODE_POLICIES[policy]  # type: ignore[index]  # one of its keys
        taken = choose(rule([*after.values()], arrival, Objectives(2.0, TPOT_S)))
        assert taken is not None
        is_kept = is_kept and taken.note is None
        after[taken.instance_id] = with_one_more(after[taken.instance_id], request)
    return [*after.values()], is_kept


def peaks(loads: list[DecodeCandidate]) -> list[float]:
    return [peak_tokens(load.sequences or ()) for load in loads]


@pytest.mark.parametrize(
    ("together", "peak"),
    [
        ((), 0),
        ((LONG_PROMPT,), 5),
        ((LONG_OUTPUT,), 5),
        ((LONG_PROMPT, LONG_PROMPT), 10),
        ((LONG_OUTPUT, LONG_OUTPUT), 10),
        ((LONG_PROMPT, LONG_OUTPUT), 7),
        (FIGURE_3, 14),
    ],
)
def test_the_most_kv_at_once_is_what_figure_3_says(together: tuple[Growth, ...], peak: float) -> None:
    assert peak_tokens(together) == peak


def test_of_figure_3_turns_break_the_capacity_and_best_fit_finds_the_best_placement() -> None:
    by_turns, _ = placed_by("round_robin", empty(2, 9), FIGURE_3)
    assert peaks(by_turns) == [10, 10]
    by_best_fit, is_kept = placed_by("best_fit", empty(2, 9), FIGURE_3)
    assert is_kept
    assert peaks(by_best_fit) == [7, 7]


def test_of_figure_3_the_program_finds_two_workers_and_no_fewer() -> None:
    exact = place_exactly([Worker(load) for load in empty(4, 9)], FIGURE_3, TPOT_S)
    assert exact is not None
    assert (exact.used, exact.is_proved) == (2, True)
    for index in set(exact.workers):
        own = {FIGURE_3[number] for number, worker in enumerate(exact.workers) if worker == index}
        assert own == {LONG_PROMPT, LONG_OUTPUT}
    assert place_exactly([Worker(load) for load in empty(1, 9)], FIGURE_3, TPOT_S) is None


def test_a_worker_in_use_is_used_first_and_what_it_has_stays() -> None:
    busy = with_one_more(empty(1, 9)[0], LONG_OUTPUT)
    workers = [Worker(load) for load in (*empty(2, 9), busy)]
    exact = place_exactly(workers, (LONG_PROMPT,), TPOT_S)
    assert exact is not None
    assert (exact.workers, exact.used) == ((2,), 1)
    exact = place_exactly(workers, (LONG_OUTPUT,), TPOT_S)
    assert exact is not None
    assert exact.used == 2


def test_a_step_over_what_is_promised_and_too_many_prompts_are_refused() -> None:
    """(b): three sequences of 5 tokens take 20 + 30 + 300 ms; 0.9 of what 0.3 s allow is less than two's."""
    steady = ((5.0, 0.0),) * 3
    workers = [Worker(load) for load in empty(3, 1000, STEP)]
    exact = place_exactly(workers, steady, TPOT_S)
    assert exact is not None
    assert exact.used == 1
    exact = place_exactly(workers, steady, 0.3)
    assert exact is not None
    assert exact.used == 2
    bounded = place_exactly([replace(worker, prompt_tokens=9.0) for worker in workers], steady, TPOT_S)
    assert bounded is not None
    assert bounded.used == 3


def test_the_newest_decisions_are_held_against_the_program() -> None:
    """d1 has enough room for all; least loaded spreads them, best fit does not."""
    for policy, used in (("least_loaded", 3), ("best_fit", 1)):
        settings = SchedulerConfig(decode_policy=policy)  # type: ignore[arg-type]  # it is one
        state = SchedulerState(LEASE_S, settings, ObjectivesConfig(tpot_s=0.1))
        ready(state, p0=0, d0=0, d1=0, d2=0)
        for number in range(3):
            state.place(make_request(f"r{number}", 40, max_tokens=20), float(number))
        found = compare_exactly(through_json(state.placer.log.newest(3)))
        assert found is not None
        assert found.exact is not None
        assert (found.requests, found.instances, found.used, found.exact.used) == (3, 3, used, 1)
        said = describe_exactness(state.placer.log.newest(3))
        assert f"{policy} had {used} of 3 decode instances in use; 1 would have done" in said
    assert "no decode instance was chosen" in describe_exactness([])


def test_each_of_several_schedulers_is_held_against_the_program_by_itself() -> None:
    """Each has one instance in use, and needs one; together they would have had two where one would do."""
    made: dict[str, list[Decision]] = {"scheduler-2": []}
    for scheduler, other in (("scheduler-1", "d1"), ("scheduler-0", "d2")):
        state = SchedulerState(LEASE_S, SchedulerConfig(), ObjectivesConfig(tpot_s=0.1))
        ready(state, **{"p0": 0, "d0": 0, other: 0})
        state.place(make_request(scheduler, 40, max_tokens=20), 0.0)
        made[scheduler] = state.placer.log.newest(1)
    said = "exact: after the newest 1 placements least_loaded had 1 of 2 decode instances in use;"
    one, other_one = describe_each(made)
    assert one.startswith(f"scheduler-0: {said}")
    assert other_one.startswith(f"scheduler-1: {said}")
    assert describe_each({"scheduler-0": made["scheduler-0"]}) == [one.removeprefix("scheduler-0: ")]


def test_placements_that_nothing_could_have_kept_are_said_to_be_so() -> None:
    state = SchedulerState(LEASE_S, SchedulerConfig(decode_policy="best_fit"), ObjectivesConfig(tpot_s=0.1))
    ready(state, p0=0, d0=0)
    for number in range(4):
        state.place(make_request(f"r{number}", 400, max_tokens=20), float(number))
    assert describe_exactness(state.placer.log.newest(4)).endswith(
        "2 placements broke a constraint; no placement keeps every constraint"
    )


def test_that_a_mixed_instance_keeps_its_own_breaks_no_constraint() -> None:
    state = SchedulerState(LEASE_S, SchedulerConfig())
    ready(state, m0=0)
    state.place(make_request("r0", 40, max_tokens=20), 0.0)
    assert "broke a constraint" not in describe_exactness(state.placer.log.newest(1))


def through_json(decisions: list[Decision]) -> list[Decision]:
    """As the command line gets them."""
    return msgspec.json.decode(msgspec.json.encode(decisions), type=list[Decision])


growths = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda pair: (float(pair[0]), float(pair[1]))),
    min_size=1,
    max_size=6,
).map(tuple)


@settings(max_examples=60, deadline=None)
@given(growths, growths, st.integers(24, 60), st.sampled_from([None, STEP]))
def test_best_fit_keeps_every_constraint_and_is_never_better_than_the_program(
    ongoing: tuple[Growth, ...],
    arrivals: tuple[Growth, ...],
    capacity_tokens: int,
    step_time: FittedTime | None,
) -> None:
    loads, _ = placed_by("best_fit", empty(12, capacity_tokens, step_time), ongoing[:3])
    after, is_kept = placed_by("best_fit", loads, arrivals)
    exact = place_exactly([Worker(load) for load in loads], arrivals, TPOT_S)
    assert is_kept, "there was an empty worker for each"
    assert all(peak <= capacity_tokens for peak in peaks(after))
    for load in after:
        if step_time is not None and load.requests:
            context = load.context_tokens + 0.5 * load.coming_tokens
            assert step_time.seconds((context / 1e3, float(load.requests), 1.0)) <= TPOT_S
    assert exact is not None
    assert exact.is_proved
    assert exact.used <= sum(load.requests > 0 for load in after)
