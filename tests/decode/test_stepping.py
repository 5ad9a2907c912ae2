"""What steps compute and whom their tokens go to: events and commands."""

from common.messages import SampledToken
from decode import events
from tests.decode.states import handle, kinds, make_state, owner_of, start, task_of


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


def test_batches_that_take_turns_are_alike_and_share_no_sequence() -> None:
    state = make_state(total_blocks=40, lanes=2)
    start(state, *(f"r{index}" for index in range(5)))
    assert {lane: len(rows) for lane, rows in state.batches.steps.items()} == {0: 1, 1: 1}
    for lane in (0, 1):
        handle(state, events.StepFinished((SampledToken(8),), lane))
    assert sorted(len(rows) for rows in state.batches.steps.values()) == [2, 3]
