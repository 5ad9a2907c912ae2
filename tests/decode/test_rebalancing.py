"""What an instance says of its sequences' needs, and sequences that are asked to go on elsewhere."""

import msgspec

from common.ids import InstanceId
from common.lengths import LengthDistribution, certain
from decode import events
from decode.forecast import Forecast, make_forecast
from decode.state import DecodeState
from scheduler.policy.decode_admission import Growing
from scheduler.policy.decode_rebalancing import HORIZON_STEPS, LEAST_STEPS
from tests.decode.states import (
    PREFILL,
    early_of,
    end_step,
    handle,
    kinds,
    make_state,
    owner_of,
    start,
    task_of,
)
from tests.decode.test_departures import HOME

ELSEWHERE = InstanceId("decode-1")


def forecast_of(
    state: DecodeState, capacity_tokens: int = 32, *prompts: Growing, can_hand_on: bool = True
) -> Forecast:
    held = [each.tokens for each in prompts]
    return make_forecast(state.sequences, held, lambda: prompts, 1, capacity_tokens, can_hand_on=can_hand_on)


def test_what_is_needed_is_what_everybody_has_and_will_draw() -> None:
    state = make_state(total_blocks=40)
    start(state, "r1", "r2", prompt_tokens=4, max_tokens=8)
    found = forecast_of(state, capacity_tokens=24)
    assert (found.coming_tokens, found.need_tokens) == (14, 24)
    assert found.movable == ()
    assert [each.request_id for each in forecast_of(state, capacity_tokens=23).movable] == ["r1", "r2"]


def test_where_nobody_looks_at_it_the_most_that_could_be_needed_is_said_and_nobody_is_named() -> None:
    state = make_state(total_blocks=40)
    start(state, "r1", "r2", prompt_tokens=4, max_tokens=8)
    looked_at = forecast_of(state, capacity_tokens=23)
    assert looked_at.need_tokens == 24
    found = make_forecast(
        state.sequences, (), tuple, 1, capacity_tokens=23, can_hand_on=True, are_needs_asked=False
    )
    assert found == looked_at._replace(need_tokens=10 + 2 * HORIZON_STEPS, movable=())


def test_the_memory_of_a_mixed_instance_s_prompts_is_not_there_for_its_sequences() -> None:
    """It grows beside them where the prompt stays; else it is given back at the next step."""
    state = make_state(total_blocks=40)
    start(state, "r1", "r2", prompt_tokens=4, max_tokens=8)
    found = forecast_of(state, 34, Growing(3, 10))
    assert (found.coming_tokens, found.need_tokens, found.movable) == (14, 34, ())
    found = forecast_of(state, 33, Growing(3, 10))
    assert [each.request_id for each in found.movable] == ["r1", "r2"]
    assert forecast_of(state, 33, Growing(8, 1)).need_tokens == 24


def test_who_outlives_its_prediction_counts_as_those_that_got_as_far() -> None:
    """One in ten draws 40 tokens, the others 2."""
    lengths = LengthDistribution(((2.0, 0.9), (40.0, 0.1)))
    state = make_state(total_blocks=40)
    task = msgspec.structs.replace(task_of(max_tokens=100), lengths=lengths)
    handle(state, events.TaskArrived(task))
    handle(state, events.PullFinished(owner_of()))
    found = forecast_of(state)
    assert (found.coming_tokens, found.length_error_tokens, found.batch_error) == (5, 0, 0)
    for _ in range(6):
        end_step(state)
    found = forecast_of(state)
    assert (found.coming_tokens, found.length_error_tokens, found.batch_error) == (33, 34, 1)


def test_no_prediction_is_trusted_for_the_time_that_a_move_takes() -> None:
    state = make_state(total_blocks=40)
    task = msgspec.structs.replace(task_of(max_tokens=100), lengths=certain(2))
    handle(state, events.TaskArrived(task))
    assert forecast_of(state).need_tokens == 5 + LEAST_STEPS


def test_those_whose_kv_is_under_way_cannot_leave_nor_those_over_attention_workers() -> None:
    state = make_state(total_blocks=40, max_batch=2)
    start(state, "runs")
    handle(state, events.TaskArrived(task_of("pulled")))
    handle(state, events.TaskArrived(task_of("waits")))
    handle(state, events.TaskArrived(early_of("early")))
    found = {each.request_id: each.has_begun for each in forecast_of(state, capacity_tokens=1).movable}
    assert found == {"runs": True, "waits": False}
    found = {
        each.request_id: each.has_begun
        for each in forecast_of(state, capacity_tokens=1, can_hand_on=False).movable
    }
    assert found == {"waits": False}


def test_a_running_sequence_that_is_asked_leaves_once_it_is_expected_elsewhere() -> None:
    state = make_state()
    start(state, "r1", "r2")
    [seek] = kinds(handle(state, events.LeaveAsked(owner_of("r1"), ELSEWHERE)), events.SeekHome)
    assert (seek.owner, seek.wanted) == (owner_of("r1"), ELSEWHERE)
    assert state.departures.is_sought(owner_of("r1"))
    assert not handle(state, events.LeaveAsked(owner_of("r1"), ELSEWHERE)), "asked twice"
    handle(state, events.HomeFound(owner_of("r1"), HOME))
    [hand_on] = kinds(end_step(state), events.HandOn)
    assert hand_on.owner == owner_of("r1")
    assert list(state.sequences) == [owner_of("r2")]


def test_one_that_finds_no_home_stays_and_can_be_asked_again() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.LeaveAsked(owner_of("r1"), ELSEWHERE))
    handle(state, events.SearchEnded(owner_of("r1")))
    assert not state.departures.is_sought(owner_of("r1"))
    assert len(kinds(handle(state, events.LeaveAsked(owner_of("r1"), ELSEWHERE)), events.SeekHome)) == 1


def test_one_that_is_to_stay_after_all_runs_on_and_can_be_asked_again() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.LeaveAsked(owner_of("r1"), ELSEWHERE))
    here = msgspec.structs.replace(HOME, decode_instance=state.instance_id)
    handle(state, events.HomeFound(owner_of("r1"), here))
    assert not kinds(end_step(state), events.HandOn)
    assert not state.departures.is_sought(owner_of("r1"))
    assert len(kinds(handle(state, events.LeaveAsked(owner_of("r1"), ELSEWHERE)), events.SeekHome)) == 1


def test_one_that_has_not_begun_goes_back_to_its_prefill_instance() -> None:
    state = make_state(max_batch=1)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    commands = handle(state, events.LeaveAsked(owner_of("r2"), ELSEWHERE))
    assert kinds(commands, events.DeclineOffer) == [events.DeclineOffer(owner_of("r2"), PREFILL, ELSEWHERE)]
    assert list(state.sequences) == [owner_of("r1")]
    handle(state, events.TaskArrived(task_of("r2")))
    assert owner_of("r2") in state.sequences, "the same attempt may come again"


def test_of_one_that_is_gone_or_on_its_way_nothing_is_done() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of("r1")))
    for name in ("r1", "r2"):
        assert not handle(state, events.LeaveAsked(owner_of(name), ELSEWHERE))
    assert list(state.sequences) == [owner_of("r1")]
