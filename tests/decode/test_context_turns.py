"""Steps that may not attend to all that runs: who is computed, and who comes next."""

import pytest

from common.messages import SampledToken
from decode import events
from decode.context_turns import ContextTurns
from decode.sequence import DecodeSequence
from decode.state import DecodeState
from scheduler.policy.decode_batching import choose_in_turn
from tests.decode.states import end_step, handle, kinds, make_state, owner_of, start, task_of


def names_of(commands: list[events.DecodeCommand]) -> list[str]:
    """In the step that begins."""
    [step] = kinds(commands, events.RunStep)
    return [row.owner.request_id for row in step.rows]


def steps_of(state: DecodeState, count: int) -> list[list[str]]:
    return [names_of(end_step(state)) for _ in range(count)]


@pytest.mark.parametrize(
    ("tokens", "turns", "most", "chosen"),
    [
        ([10, 10, 10], [0, 0, 0], 30, [0, 1, 2]),
        ([10, 10, 10], [0, 0, 0], 29, [0, 1]),
        ([10, 10, 10], [1, 1, 0], 20, [2, 0]),
        ([10, 40, 10], [1, 0, 1], 20, [1]),
        ([10, 15, 10], [0, 1, 2], 20, [0]),
    ],
)
def test_whoever_has_the_first_turn_comes_first_until_one_is_too_much(
    tokens: list[int], turns: list[int], most: int, chosen: list[int]
) -> None:
    """Nobody passes one that does not fit."""
    assert choose_in_turn(tokens, turns, most) == chosen


def test_those_that_are_left_out_come_first_in_the_next_step_and_newcomers_after_them() -> None:
    state = make_state(total_blocks=60, most_context=12)
    start(state, "r1", "r2", "r3", max_tokens=50)
    assert steps_of(state, 3) == [["r2", "r3"], ["r1", "r2"], ["r3"]]
    handle(state, events.TaskArrived(task_of("r4", max_tokens=50)))
    handle(state, events.PullFinished(owner_of("r4")))
    assert steps_of(state, 4) == [["r1"], ["r2", "r4"], ["r3"], ["r1"]]


def test_whoever_is_longer_than_a_step_may_be_is_computed_alone() -> None:
    alone, state = (make_state(total_blocks=60, most_context=6) for _ in range(2))
    start(alone, "r1", prompt_tokens=20, max_tokens=50)
    assert alone.steps_ahead() == 49
    start(state, "r1", "r2", prompt_tokens=20, max_tokens=50)
    assert steps_of(state, 3) == [["r2"], ["r1"], ["r2"]]


def test_steps_run_on_until_their_contexts_have_grown_too_long() -> None:
    state = make_state(total_blocks=60, most_context=20)
    start(state, "r1", "r2", max_tokens=50)
    assert names_of(end_step(state)) == ["r1", "r2"]
    # Of 6 and 5 tokens now.
    assert state.context_of_step() == 11
    assert state.steps_ahead() == 5
    before = SampledToken(8)
    commands = handle(state, events.StepsFinished(5, (before, before), before))
    assert names_of(commands) == ["r2"]
    assert state.steps_ahead() == 1, "somebody waits for his turn"


def test_without_a_bound_a_step_takes_everybody() -> None:
    state = make_state(total_blocks=200)
    start(state, *(f"r{number}" for number in range(8)), prompt_tokens=60, max_tokens=50)
    assert len(names_of(end_step(state))) == 8


def test_all_come_to_their_ends_in_turns() -> None:
    state = make_state(total_blocks=200, most_context=30)
    start(state, *(f"r{number}" for number in range(6)), prompt_tokens=9, max_tokens=7)
    steps = 0
    while state.sequences:
        end_step(state)
        steps += 1
    assert steps > 6, "more than all at once would have taken"
    assert state.blocks.free_blocks == 200


def test_who_lacks_a_block_for_a_step_keeps_his_turn() -> None:
    turns = ContextTurns(most_tokens=12)
    state = make_state(total_blocks=60)
    start(state, "r1", "r2", "r3", max_tokens=50)
    everyone = list(state.sequences.values())
    first, second, third = everyone

    def chosen(ready: list[DecodeSequence]) -> list[str]:
        return [each.owner.request_id for each in turns.choose(0, ready, state.sequences)]

    assert chosen(everyone) == ["r1", "r2"]
    assert chosen([first, second]) == ["r1", "r2"]
    assert chosen(everyone) == ["r1", "r3"], "he was left out before anybody"
    del state.sequences[second.owner]
    assert chosen([first, third]) == ["r1", "r3"]
    assert set(turns._turns[0]) == {first.owner, third.owner}


def test_a_token_takes_as_many_steps_as_there_are_turns() -> None:
    state = make_state(total_blocks=60, most_context=12)
    start(state, "r1", "r2", "r3", "r4", max_tokens=50)
    assert state.turns.steps_per_token(0) == 1.0
    assert names_of(end_step(state)) == ["r2", "r3"]
    assert state.turns.steps_per_token(0) == 2.0
    assert state.mates.decoding == 2, "so many tokens of a pass are theirs"
    unbounded = make_state(total_blocks=60)
    start(unbounded, "r1", "r2", "r3", max_tokens=50)
    end_step(unbounded)
    assert (unbounded.turns.steps_per_token(0), unbounded.mates.decoding) == (1.0, 3)
