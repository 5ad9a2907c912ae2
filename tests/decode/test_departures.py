"""Running sequences that leave as the instance's role has changed: events and commands."""

from common.ids import Incarnation, InstanceId, RequestId
from common.messages import Placement, SampledToken
from decode import events
from tests.decode.states import FAILED, end_step, handle, kinds, make_state, owner_of, start, task_of

HOME = Placement(InstanceId("decode-0"), Incarnation("d1"), InstanceId("decode-1"), Incarnation("d2"))


def test_a_running_sequence_leaves_between_two_steps_with_its_blocks_and_all_it_drew() -> None:
    state = make_state()
    start(state, "r1")
    [seek] = kinds(handle(state, events.RoleChanged(is_decode=False)), events.SeekHome)
    assert (seek.owner, seek.request.output_ids) == (owner_of("r1"), (7,))
    held = list(state.blocks.block_table(owner_of("r1")))
    assert not kinds(handle(state, events.HomeFound(owner_of("r1"), HOME)), events.HandOn)
    commands = end_step(state)
    assert [type(command) for command in commands] == [events.PublishTokens, events.HandOn]
    [hand_on] = kinds(commands, events.HandOn)
    assert (hand_on.home, hand_on.request.output_ids) == (HOME, (7, 8))
    assert state.blocks.block_table(hand_on.held_by) == held
    assert state.is_idle
    assert state.departures.departed == 1


def test_so_it_does_after_steps_of_which_only_the_ends_are_told_while_the_others_go_on() -> None:
    state, drawn = make_state(total_blocks=16), SampledToken(8)
    start(state, "r1", "r2", "r3")
    end_step(state)
    handle(state, events.RoleChanged(is_decode=False))
    handle(state, events.HomeFound(owner_of("r2"), HOME))
    assert state.steps_ahead() == 1
    commands = handle(state, events.StepsFinished(1, (drawn,) * 3, drawn))
    assert [each.owner for each in kinds(commands, events.HandOn)] == [owner_of("r2")]
    [step] = kinds(commands, events.RunStep)
    assert [row.owner for row in step.rows] == [owner_of("r1"), owner_of("r3")]


def test_what_comes_to_run_later_leaves_too_and_is_asked_for_once() -> None:
    state = make_state()
    handle(state, events.RoleChanged(is_decode=False))
    handle(state, events.TaskArrived(task_of("r1")))
    assert len(kinds(handle(state, events.PullFinished(owner_of("r1"))), events.SeekHome)) == 1
    assert not kinds(end_step(state), events.SeekHome)


def test_without_a_home_a_sequence_goes_on_here() -> None:
    state = make_state()
    start(state, "r1", max_tokens=3)
    handle(state, events.RoleChanged(is_decode=False))
    end_step(state)
    [published] = kinds(end_step(state), events.PublishTokens)
    assert published.events[0].finish_reason == "length"
    assert not state.departures.is_sought(owner_of("r1"))
    assert not handle(state, events.HomeFound(owner_of("r1"), HOME))


def test_back_in_its_role_an_instance_keeps_its_sequences_but_for_those_that_are_expected_elsewhere() -> None:
    state = make_state(total_blocks=16)
    start(state, "r1", "r2")
    end_step(state)
    handle(state, events.RoleChanged(is_decode=False))
    handle(state, events.HomeFound(owner_of("r1"), HOME))
    handle(state, events.RoleChanged(is_decode=True))
    assert not state.departures.is_sought(owner_of("r2"))
    handle(state, events.SearchEnded(owner_of("r2")))
    [hand_on] = kinds(end_step(state), events.HandOn)
    assert hand_on.owner == owner_of("r1")
    assert list(state.sequences) == [owner_of("r2")]
    assert len(kinds(handle(state, events.RoleChanged(is_decode=False)), events.SeekHome)) == 1


def test_a_sequence_that_ends_while_a_home_is_sought_leaves_nothing() -> None:
    state = make_state()
    start(state, "r1", "r2")
    handle(state, events.RoleChanged(is_decode=False))
    for name in ("r1", "r2"):
        handle(state, events.HomeFound(owner_of(name), HOME))
    assert list(state.sequences) == [owner_of("r1")]
    handle(state, events.CancelArrived(RequestId("r1"), 0))
    assert not kinds(handle(state, events.StepFinished((SampledToken(8),))), events.HandOn)
    assert state.is_idle


def test_a_step_that_fails_takes_nobody_elsewhere() -> None:
    state = make_state()
    start(state, "r1")
    handle(state, events.RoleChanged(is_decode=False))
    handle(state, events.HomeFound(owner_of("r1"), HOME))
    assert not kinds(handle(state, events.StepFailed(FAILED)), events.HandOn)
    assert state.is_idle
    assert state.blocks.free_blocks == 8
