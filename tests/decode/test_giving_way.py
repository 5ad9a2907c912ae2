"""Sequences that are preempted for memory, or for a prompt: which, how often, and by whom not."""

import pytest

from common.config import DecodeAdmission
from common.kv.blocks import BlockOwner
from common.lifecycle import DecodePhase
from common.messages import SampledToken
from common.sequences import PublishFailure
from decode import events
from decode.state import DecodeState
from scheduler.policy.decode_admission import ADMISSIONS
from scheduler.policy.mixed_batching import MAX_PREEMPTIONS
from tests.decode.states import end_step, handle, kinds, make_state, owner_of, start, task_of
from tests.decode.test_staying import stay

PROMPTS = BlockOwner("prefill", owner_of("r9").request_id, 0)


def wanting_state(wanted_blocks: int, *, is_mixed: bool = True) -> DecodeState:
    """Three sequences of two blocks each in a pool of eight; a prompt wants so many."""
    state = make_state(total_blocks=8)
    start(state, "r1", "r2", "r3", prompt_tokens=5, max_tokens=3)
    state.mates.is_mixed, state.mates.wanted_blocks = is_mixed, wanted_blocks
    return state


def preempted(state: DecodeState) -> list[str]:
    return [str(failure.failure.request_id) for failure in kinds(end_step(state), PublishFailure)]


def test_the_latest_arrivals_give_way_between_two_steps_and_can_be_continued() -> None:
    state = wanting_state(4)
    [failure] = kinds(end_step(state), PublishFailure)
    assert (failure.failure.request_id, failure.failure.can_continue) == ("r3", True)
    assert state.blocks.free_blocks == 4
    assert state.preempted == 1


def test_nobody_gives_way_where_that_is_not_enough_or_the_role_is_another() -> None:
    assert preempted(wanting_state(8)) == []
    assert preempted(wanting_state(4, is_mixed=False)) == []
    assert preempted(wanting_state(2)) == []


def test_one_that_was_given_up_so_often_stays() -> None:
    state = wanting_state(4)
    state.sequences[owner_of("r3")].preemptions = MAX_PREEMPTIONS
    assert preempted(state) == ["r2"]


def copying_state(total_blocks: int = 24) -> DecodeState:
    """Of three sequences the third has given way to a prompt that lacks 3 blocks, and its KV
    is being copied out."""
    state = make_state(total_blocks=total_blocks, block_size=2, host_blocks=24, max_batch=3)
    start(state, "r1", "r2", "r3", prompt_tokens=8)
    state.mates.is_mixed, state.mates.wanted_blocks = True, total_blocks - 12
    [swap] = kinds(end_step(state), events.SwapOut)
    assert swap.owner == owner_of("r3")
    return state


def test_who_gave_way_does_not_come_back_before_the_prompt_until_it_has_waited_so_long() -> None:
    state = copying_state()
    copied = events.SwapFinished(owner_of("r3"), 4, 0.1)
    assert not kinds(handle(state, copied), events.SwapIn)
    assert state.blocks.free_blocks >= 12
    state.mates.max_wait_s = 2.0
    assert not kinds(handle(state, events.BlocksFreed(), now=1.9), events.SwapIn)
    assert kinds(handle(state, events.BlocksFreed(), now=2.0), events.SwapIn)


def test_no_newcomer_takes_what_a_prompt_waits_for() -> None:
    state = wanting_state(4)
    end_step(state)
    assert not kinds(handle(state, events.TaskArrived(task_of("r4", 4, 4))), events.PullSequence)
    state.mates.wanted_blocks = 0
    assert kinds(handle(state, events.BlocksFreed()), events.PullSequence)


def test_what_prompts_owe_to_who_is_away_lets_it_come_back_beside_those_that_grow() -> None:
    state = copying_state(26)
    handle(state, events.SwapFinished(owner_of("r3"), 4, 0.1))
    state.mates.wanted_blocks = 0
    state.blocks.try_allocate(PROMPTS, state.blocks.free_blocks - state.mates.owed_blocks(2.0))
    assert kinds(handle(state, events.BlocksFreed(), now=2.0), events.SwapIn)


def test_who_is_away_comes_back_though_later_ones_that_stayed_fill_the_batch() -> None:
    state = copying_state(40)
    for name in ("s1", "s2"):
        stay(state, task_of(name, 2, 4), BlockOwner("kept", owner_of(name).request_id, 0))
    state.mates.wanted_blocks = 0
    copied = events.SwapFinished(owner_of("r3"), 4, 0.1)
    assert kinds(handle(state, copied), events.SwapIn)


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
def test_what_prompts_owe_to_a_newcomer_lets_it_in_beside_those_that_run(admission: DecodeAdmission) -> None:
    state = make_state(total_blocks=26, block_size=2, admission=admission)
    start(state, "r1", "r2", prompt_tokens=8)
    state.blocks.try_allocate(PROMPTS, state.blocks.free_blocks)
    handle(state, events.TaskArrived(task_of("r3", 8)))
    state.blocks.release(PROMPTS)
    state.blocks.try_allocate(PROMPTS, state.blocks.free_blocks - state.mates.owed_blocks(2.0))
    handle(state, events.BlocksFreed(), now=2.0)
    assert state.sequences[owner_of("r3")].phase is DecodePhase.PULLING


def test_one_that_came_earlier_waits_for_nobody_who_was_preempted_later() -> None:
    """Prompts that stay here are preempted again and again: there may always be somebody away."""
    state = make_state(total_blocks=24, block_size=2, host_blocks=24)
    start(state, "r1", prompt_tokens=8)
    other = BlockOwner("prefill", owner_of("r8").request_id, 0)
    state.blocks.try_allocate(PROMPTS, 10)
    state.blocks.try_allocate(other, 4)
    handle(state, events.TaskArrived(task_of("waits", 8)))
    stay(state, task_of("later", 8), BlockOwner("kept", owner_of("later").request_id, 0))
    state.mates.is_mixed, state.mates.wanted_blocks = True, 3
    [swap] = kinds(end_step(state), events.SwapOut)
    assert swap.owner == owner_of("later")
    state.mates.wanted_blocks = 0
    handle(state, events.SwapFinished(swap.owner, 4, 0.1))
    assert state.sequences[owner_of("waits")].phase is DecodePhase.WAITING
    state.blocks.release(other)
    handle(state, events.BlocksFreed())
    phases = {str(owner.request_id): each.phase for owner, each in state.sequences.items()}
    assert (phases["waits"], phases["later"]) == (DecodePhase.PULLING, DecodePhase.SWAPPED)


def test_without_a_free_block_the_latest_arrival_is_given_up_and_can_continue() -> None:
    state = make_state(total_blocks=5, block_size=2)
    start(state, "old", "young", prompt_tokens=2, max_tokens=6)
    preempted: list[PublishFailure] = []
    while not preempted:
        rows = len(state.batches.steps[0])
        preempted = kinds(
            handle(state, events.StepFinished(tuple(SampledToken(8) for _ in range(rows)))),
            PublishFailure,
        )
    assert [(each.failure.request_id, each.failure.can_continue) for each in preempted] == [("young", True)]
    assert state.preempted == 1
    assert list(state.sequences) == [owner_of("old")]


def test_no_more_are_given_up_than_memory_asks_for() -> None:
    """Three sequences lack a block at once: the last one's end gives two and needs none itself."""
    state = make_state(total_blocks=8, block_size=2)
    for request_id, prompt_tokens in (("old", 2), ("middle", 3), ("young", 1)):
        handle(state, events.TaskArrived(task_of(request_id, prompt_tokens, max_tokens=10)))
    for request_id in ("old", "middle", "young"):
        handle(state, events.PullFinished(owner_of(request_id)))
    handle(state, events.StepFinished((SampledToken(8),)))
    for _ in range(3):
        assert len(state.sequences) == 3
        handle(state, events.StepFinished((SampledToken(8),) * 3))
    assert list(state.sequences) == [owner_of("old"), owner_of("middle")]
