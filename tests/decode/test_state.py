"""The decode room's decisions, as events and commands."""

import pytest

from common.errors import NoInstanceReady
from common.ids import RequestId
from common.messages import SampledToken
from common.sequences import PublishFailure
from decode import events
from tests.decode.states import PREFILL, handle, kinds, make_state, owner_of, start, task_of


def test_a_sequence_is_pulled_then_runs_until_its_last_token() -> None:
    state = make_state()
    [pull] = kinds(handle(state, events.TaskArrived(task_of(max_tokens=3))), events.PullSequence)
    assert (pull.prefill_instance, len(pull.blocks)) == (PREFILL, 2)
    commands = handle(state, events.PullFinished(owner_of()), now=2.5)
    assert kinds(commands, events.ObserveAdmission) == [events.ObserveAdmission(2.5)]
    [step] = kinds(commands, events.RunStep)
    assert [(row.position, row.output_ids) for row in step.rows] == [(4, [7])]
    commands = handle(state, events.StepFinished((SampledToken(8),)))
    [published] = kinds(commands, events.PublishTokens)
    assert [(event.index, event.token.token_id) for event in published.events] == [(1, 8)]
    [published] = kinds(handle(state, events.StepFinished((SampledToken(9),))), events.PublishTokens)
    assert published.events[0].finish_reason == "length"
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_a_cancelled_sequence_frees_its_blocks_after_the_step_in_flight() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert state.blocks.free_blocks == 6
    assert not kinds(handle(state, events.StepFinished((SampledToken(8),))), events.PublishTokens)
    assert state.is_idle
    assert state.blocks.free_blocks == 8


def test_draining_gives_back_what_waits_and_finishes_what_runs() -> None:
    state = make_state(max_batch=1)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    [given_back] = kinds(handle(state, events.DrainStarted()), PublishFailure)
    assert (given_back.failure.request_id, given_back.failure.can_continue) == ("r2", True)
    with pytest.raises(NoInstanceReady):
        handle(state, events.TaskArrived(task_of("r3")))
    [given_back] = kinds(handle(state, events.DrainExpired()), PublishFailure)
    assert given_back.failure.request_id == "r1"
    handle(state, events.StepFinished((SampledToken(8),)))
    assert state.is_idle


def test_a_sequence_that_was_placed_here_before_the_role_changed_is_still_taken() -> None:
    """Its prompt is computed elsewhere: turned away, it would be computed again."""
    state = make_state()
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    assert not kinds(handle(state, events.RoleChanged(is_decode=False)), PublishFailure)
    handle(state, events.TaskArrived(task_of("r3")))
    assert list(state.sequences) == [owner_of("r1"), owner_of("r2"), owner_of("r3")]


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    state = make_state()
    start(state, "r1")
    for event in (events.StepFinished(()), events.PullFinished(owner_of()), events.PullDrained(owner_of())):
        with pytest.raises(ValueError, match=r"step|pulled|quarantine"):
            handle(state, event)
        state.check()
    assert kinds(handle(state, events.StepFinished((SampledToken(8),))), events.RunStep)
