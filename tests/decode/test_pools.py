"""KV pools that come and go, and sequences resumed where their KV is kept, as events and commands."""

import pytest

from common.errors import HandoverFailed, NoInstanceReady
from common.messages import SampledToken
from common.sequences import PublishFailure
from decode import events
from tests.decode.states import (
    FAILED,
    FORMER,
    end_step,
    handle,
    kinds,
    make_state,
    owner_of,
    resumed_of,
    start,
    task_of,
)


def test_without_a_pool_nothing_is_taken_in_and_a_lost_one_gives_its_sequences_back() -> None:
    state = make_state(total_blocks=0)
    with pytest.raises(NoInstanceReady, match="no attention worker"):
        handle(state, events.TaskArrived(task_of("r0")))
    handle(state, events.PoolAdded(8))
    start(state, "r1", "r2")
    commands = handle(state, events.PoolLost(0))
    assert [command.failure.request_id for command in kinds(commands, PublishFailure)] == ["r2"]
    commands = handle(state, events.StepFinished((None,)))
    [failed] = kinds(commands, PublishFailure)
    assert (failed.failure.request_id, failed.failure.can_continue) == ("r1", True)
    assert state.is_idle
    assert state.blocks.pools == []


def test_a_closed_pool_keeps_its_sequences_and_gets_no_new_ones() -> None:
    state = make_state(total_blocks=8)
    start(state, "r1")
    handle(state, events.PoolAdded(6))
    handle(state, events.PoolClosed(0))
    handle(state, events.TaskArrived(task_of("r2")))
    assert state.blocks.pool_of(owner_of("r2")) == 1
    with pytest.raises(ValueError, match="pool 0 is in use"):
        handle(state, events.PoolLeft(0))
    while state.running:
        handle(state, events.StepFinished((SampledToken(8),)))
    handle(state, events.PoolLeft(0))
    assert state.blocks.pools == [1]


def test_a_resumed_sequence_runs_where_its_kv_is_kept_and_draws_its_next_token() -> None:
    state = make_state(total_blocks=6)
    handle(state, events.PoolAdded(8))
    [inherit] = kinds(handle(state, events.ResumeArrived(resumed_of(), 0)), events.InheritSequence)
    # Six tokens, the last without KV; the second block holds its position, too.
    assert inherit == events.InheritSequence(owner_of(attempt=1), FORMER, 5, (0, 1))
    [step] = kinds(handle(state, events.PullFinished(owner_of(attempt=1))), events.RunStep)
    assert [(row.position, row.output_ids) for row in step.rows] == [(5, [7, 8])]
    [published] = kinds(handle(state, events.StepFinished((SampledToken(9),))), events.PublishTokens)
    assert [(event.attempt, event.index) for event in published.events] == [(1, 2)]


def test_a_resumed_sequence_of_whole_blocks_inherits_none_for_its_next_position() -> None:
    state = make_state(block_size=5)
    task = resumed_of(prompt_tokens=4)
    [inherit] = kinds(handle(state, events.ResumeArrived(task, 0)), events.InheritSequence)
    assert (inherit.tokens, len(inherit.blocks), len(state.blocks.block_table(inherit.owner))) == (5, 1, 2)


def test_kv_that_is_not_kept_any_more_sends_the_sequence_back_and_frees_its_blocks() -> None:
    state = make_state()
    handle(state, events.ResumeArrived(resumed_of(), 0))
    commands = handle(state, events.PullFailed(owner_of(attempt=1), FAILED, is_drained=True))
    [failure] = kinds(commands, PublishFailure)
    assert (failure.failure.can_continue, failure.failure.lost_instance) == (True, None)
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_a_resumed_sequence_waits_for_its_own_pool_and_goes_back_when_that_closes() -> None:
    state = make_state(total_blocks=4)
    handle(state, events.PoolAdded(8))
    handle(state, events.PoolClosed(1))
    start(state, "r0", prompt_tokens=8)
    handle(state, events.PoolAdded(8))
    assert not kinds(handle(state, events.ResumeArrived(resumed_of(), 0)), events.InheritSequence)
    [failure] = kinds(handle(state, events.PoolClosed(0)), PublishFailure)
    assert (failure.failure.request_id, failure.failure.can_continue) == ("r1", True)
    for pool, reason in ((0, "has 0 for it"), (1, "has 0 for it")):
        with pytest.raises(HandoverFailed, match=reason):
            handle(state, events.ResumeArrived(resumed_of("r2"), pool))
    with pytest.raises(HandoverFailed, match="may need 9 KV blocks; instance decode-0 has 8"):
        handle(state, events.ResumeArrived(resumed_of("r2", max_tokens=30), 2))
    assert list(state.sequences) == [owner_of("r0")]


def test_new_sequences_go_where_most_is_free() -> None:
    state = make_state(total_blocks=8)
    handle(state, events.PoolAdded(8))
    homes = []
    for index, prompt_tokens in enumerate((20, 4, 4, 4)):
        commands = handle(state, events.TaskArrived(task_of(f"r{index}", prompt_tokens)))
        homes.append(state.blocks.pool_of(kinds(commands, events.PullSequence)[0].owner))
    assert homes == [0, 1, 1, 1]


def test_a_sequence_enters_only_a_pool_that_holds_it_to_its_end() -> None:
    state = make_state(total_blocks=6)
    handle(state, events.PoolAdded(20))
    start(state, "long0", prompt_tokens=60)
    assert state.blocks.free_blocks_in(1) == 4
    handle(state, events.TaskArrived(task_of("long1", max_tokens=44)))
    handle(state, events.TaskArrived(task_of("short")))
    homes = [state.blocks.pool_of(owner_of(name)) for name in ("long1", "short")]
    assert homes == [1, 0], "twelve blocks do not fit the pool of which most is free"
    while state.batches.is_computing:
        pulls = kinds(end_step(state), events.PullSequence)
        while pulls:
            pulls += kinds(handle(state, events.PullFinished(pulls.pop().owner)), events.PullSequence)
    assert (state.preempted, state.is_idle) == (0, True)


def test_who_cannot_grow_and_has_nobody_to_wait_for_goes_back() -> None:
    state = make_state(total_blocks=4)
    start(state, "r1", max_tokens=12)
    handle(state, events.TaskArrived(task_of("r2", prompt_tokens=1)))
    end_step(state)
    handle(state, events.PullFailed(owner_of("r2"), FAILED, is_drained=False))
    commands: list[events.DecodeCommand] = []
    while state.batches.is_computing:
        commands = end_step(state)
    [failure] = kinds(commands, PublishFailure)
    assert (failure.failure.error.code, failure.failure.can_continue) == ("overloaded", True)
    assert (state.is_idle, state.blocks.quarantined_blocks) == (True, 1)


def test_who_waits_for_any_pool_goes_back_when_the_one_that_comes_is_too_small() -> None:
    state = make_state(total_blocks=4)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("short", max_tokens=4)))
    handle(state, events.TaskArrived(task_of("long", prompt_tokens=8)))
    handle(state, events.PoolLost(0))
    assert len(state.sequences) == 3
    [failure] = kinds(handle(state, events.PoolAdded(2)), PublishFailure)
    assert (failure.failure.request_id, failure.failure.can_continue) == ("long", True)
