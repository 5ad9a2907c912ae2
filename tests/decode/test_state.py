"""The decode room's decisions, as events and commands."""

import pytest

from common.errors import HandoverFailed, NoInstanceReady, Overloaded, RequestCancelled
from common.ids import RequestId
from common.messages import SampledToken
from common.sequences import PublishFailure
from decode import events
from tests.decode.states import FAILED, PREFILL, handle, kinds, make_state, owner_of, start, task_of


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


def test_every_gateway_gets_one_message_a_step() -> None:
    state = make_state()
    start(state, "r1", "r2", "r3")
    handle(state, events.StepFinished((SampledToken(8),)))
    commands = handle(state, events.StepFinished(tuple(SampledToken(8) for _ in range(3))))
    assert [len(command.events) for command in kinds(commands, events.PublishTokens)] == [3]


def test_a_sequence_joins_at_the_next_step_without_waiting_for_the_batch_to_end() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.StepFinished((SampledToken(8),)))
    handle(state, events.TaskArrived(task_of("r2")))
    assert not kinds(handle(state, events.PullFinished(owner_of("r2"))), events.RunStep)
    [step] = kinds(handle(state, events.StepFinished((SampledToken(8),))), events.RunStep)
    assert [row.owner.request_id for row in step.rows] == ["r1", "r2"]


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


def test_an_earlier_attempt_that_comes_late_is_refused() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of(attempt=1)))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of()))
    assert list(state.sequences) == [owner_of(attempt=1)]


def test_an_attempt_whose_blocks_rest_in_quarantine_is_not_taken_again() -> None:
    state = make_state()
    handle(state, events.TaskArrived(task_of()))
    handle(state, events.PullFailed(owner_of(), FAILED, is_drained=False))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of()))
    assert state.is_idle


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


def test_bounds_are_kept_with_typed_errors() -> None:
    state = make_state(max_batch=1, max_waiting_requests=1)
    start(state, "r1")
    handle(state, events.TaskArrived(task_of("r2")))
    with pytest.raises(Overloaded, match=r"instance\.max_waiting_requests"):
        handle(state, events.TaskArrived(task_of("r3")))
    with pytest.raises(HandoverFailed, match="KV blocks"):
        handle(make_state(), events.TaskArrived(task_of("r4", 20, 20)))
    handle(state, events.CancelArrived(RequestId("r5"), 3))
    with pytest.raises(RequestCancelled):
        handle(state, events.TaskArrived(task_of("r5", attempt=3)))


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    state = make_state()
    start(state, "r1")
    for event in (events.StepFinished(()), events.PullFinished(owner_of()), events.PullDrained(owner_of())):
        with pytest.raises(ValueError, match=r"step|pulled|quarantine"):
            handle(state, event)
        state.check()
    assert kinds(handle(state, events.StepFinished((SampledToken(8),))), events.RunStep)


def test_batches_that_take_turns_are_alike_and_share_no_sequence() -> None:
    state = make_state(total_blocks=40, lanes=2)
    start(state, *(f"r{index}" for index in range(5)))
    assert {lane: len(rows) for lane, rows in state.batches.steps.items()} == {0: 1, 1: 1}
    for lane in (0, 1):
        handle(state, events.StepFinished((SampledToken(8),), lane))
    assert sorted(len(rows) for rows in state.batches.steps.values()) == [2, 3]
