"""Preempted sequences that wait in the host tier: events and commands."""

from collections.abc import Callable

import msgspec
import pytest

from common.ids import RequestId
from common.lifecycle import DecodePhase
from common.performance import FittedTime, PromptTime
from common.sequences import PublishFailure
from decode import events
from decode.state import DecodeState
from tests.decode.states import FAILED, handle, kinds, make_state, owner_of, start, task_of
from tests.decode.states import end_step as end_one_step
from tests.decode.test_departures import HOME
from tests.requests import GATEWAY

YOUNG = owner_of("young")


def preempting(host_blocks: int = 8) -> tuple[DecodeState, list[events.DecodeCommand]]:
    """Two sequences in a pool for one and a half, and what was said when it was full."""
    state = make_state(total_blocks=5, block_size=2, host_blocks=host_blocks)
    start(state, "old", "young", prompt_tokens=2, max_tokens=6)
    commands: list[events.DecodeCommand] = []
    while state.preempted == 0:
        commands = end_one_step(state)
    return state, commands


def swapping_out() -> DecodeState:
    return preempting()[0]


def swapped() -> DecodeState:
    state = swapping_out()
    handle(state, events.SwapFinished(YOUNG, 2, 0.1))
    return state


def swapping_in() -> DecodeState:
    state = swapped()
    while state.sequences[YOUNG].phase is DecodePhase.SWAPPED:
        end_one_step(state)
    return state


def test_the_latest_arrival_is_copied_out_and_holds_its_blocks_until_that_has_ended() -> None:
    state, commands = preempting()
    [swap] = kinds(commands, events.SwapOut)
    sequence = state.sequences[YOUNG]
    assert swap.owner == YOUNG
    assert swap.blocks == tuple(state.blocks.block_table(YOUNG))[: len(swap.host_blocks)]
    assert len(swap.host_blocks) * 2 >= sequence.position
    assert state.blocks.is_pinned(YOUNG)
    handle(state, events.SwapFinished(YOUNG, 4, 0.1))
    assert YOUNG not in state.blocks.owners()
    assert sequence.phase is DecodePhase.SWAPPED
    assert (state.swapping.swaps, state.preempted) == (1, 1)


def test_it_comes_back_into_other_blocks_when_there_is_room_and_goes_on_where_it_was() -> None:
    state = swapped()
    drawn = list(state.sequences[YOUNG].output_ids)
    swaps: list[events.SwapIn] = []
    while not swaps:
        swaps = kinds(end_one_step(state), events.SwapIn)
    assert swaps[0].host_blocks == tuple(state.swapping.host.block_table(YOUNG))
    [step] = kinds(handle(state, events.SwapFinished(YOUNG, 4, 0.1)), events.RunStep)
    [row] = step.rows
    assert (row.owner, row.output_ids) == (YOUNG, drawn)
    assert state.swapping.host.used_blocks == 0


def test_nobody_new_is_taken_in_while_somebody_is_away() -> None:
    state = swapped()
    assert not kinds(handle(state, events.TaskArrived(task_of("new", 1, 2))), events.PullSequence)
    while state.swapping.away:
        commands = end_one_step(state) if state.batches.steps else []
        if state.sequences[YOUNG].phase is DecodePhase.SWAPPING_IN:
            commands = handle(state, events.SwapFinished(YOUNG, 4, 0.1))
    assert kinds(commands, events.PullSequence)


def test_without_room_in_the_host_tier_it_is_given_up() -> None:
    _, commands = preempting(host_blocks=1)
    [given_up] = kinds(commands, PublishFailure)
    assert (given_up.failure.request_id, given_up.failure.can_continue) == ("young", True)


def test_where_computing_it_again_is_cheaper_it_is_given_up() -> None:
    """By what prefill instances say of themselves and what the first copies took."""
    state = swapping_in()
    handle(state, events.SwapFinished(YOUNG, 1, 1000.0))
    quick = PromptTime(FittedTime((0.0, 0.0, 0.001), 0.0, 20), 512)
    while not state.is_idle:
        end_one_step(state)
    for name in ("third", "fourth"):
        task = msgspec.structs.replace(task_of(name, 2, 6), prompt_time=quick)
        handle(state, events.TaskArrived(task))
    commands: list[events.DecodeCommand] = []
    for name in ("third", "fourth"):
        commands = handle(state, events.PullFinished(owner_of(name)))
    while not kinds(commands, PublishFailure):
        assert not kinds(commands, events.SwapOut)
        commands = end_one_step(state)
    assert state.swapping.swaps == 1


@pytest.mark.parametrize("has_arrived", [True, False])
@pytest.mark.parametrize("make", [swapping_out, swapping_in])
def test_who_is_cancelled_amid_a_copy_stays_until_its_end(
    make: Callable[[], DecodeState], has_arrived: bool
) -> None:
    state = make()
    handle(state, events.CancelArrived(RequestId("young"), 0))
    assert YOUNG in state.sequences
    ended = events.SwapFinished(YOUNG, 4, 0.1) if has_arrived else events.SwapFailed(YOUNG)
    assert not kinds(handle(state, ended), PublishFailure)
    assert YOUNG not in state.sequences
    assert state.swapping.host.used_blocks == 0


@pytest.mark.parametrize(
    "event",
    [events.CancelArrived(RequestId("young"), 0), events.GatewayGone(GATEWAY), events.DrainExpired()],
    ids=["cancel", "gateway gone", "drain"],
)
def test_who_ends_in_the_host_tier_leaves_it_at_once(event: events.DecodeEvent) -> None:
    state = swapped()
    handle(state, event)
    assert YOUNG not in state.sequences
    assert state.swapping.host.used_blocks == 0


def test_a_drain_waits_for_those_that_are_away() -> None:
    state = swapped()
    assert not kinds(handle(state, events.DrainStarted()), PublishFailure)
    while state.sequences[YOUNG].phase is DecodePhase.SWAPPED:
        end_one_step(state)
    handle(state, events.SwapFinished(YOUNG, 4, 0.1))
    while not state.is_idle:
        assert not kinds(end_one_step(state), PublishFailure)


def test_a_copy_that_fails_sends_its_sequence_back() -> None:
    for make in (swapping_out, swapping_in):
        state = make()
        [failed] = kinds(handle(state, events.SwapFailed(YOUNG)), PublishFailure)
        assert (failed.failure.request_id, failed.failure.can_continue) == ("young", True)
        assert state.swapping.away == 0


def test_after_a_change_of_role_it_comes_back_and_leaves_from_here() -> None:
    state = swapped()
    assert [each.owner.request_id for each in kinds(flip(state), events.SeekHome)] == ["old"]
    handle(state, events.HomeFound(owner_of("old"), HOME))
    [hand_on] = kinds(end_one_step(state), events.HandOn)
    state.blocks.release(hand_on.held_by)
    assert len(kinds(handle(state, events.BlocksFreed()), events.SwapIn)) == 1
    commands = handle(state, events.SwapFinished(YOUNG, 4, 0.1))
    assert [each.owner for each in kinds(commands, events.SeekHome)] == [YOUNG]


def test_word_of_a_copy_that_is_not_under_way_raises_and_changes_nothing() -> None:
    state = swapped()
    for event in (events.SwapFinished(YOUNG, 1, 0.1), events.SwapFailed(owner_of("old"))):
        with pytest.raises(ValueError, match="copied"):
            handle(state, event)
        state.check()


def test_a_step_that_fails_takes_nobody_from_the_host_tier() -> None:
    state = swapped()
    commands = handle(state, events.StepFailed(FAILED))
    assert [each.owner for each in kinds(commands, events.SwapIn)] == [YOUNG]


def flip(state: DecodeState) -> list[events.DecodeCommand]:
    return handle(state, events.RoleChanged(is_decode=False))
