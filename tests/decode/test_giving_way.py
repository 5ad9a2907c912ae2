"""Decodes of a mixed instance that are preempted for a prompt: which, how often, and by whom not."""

from common.sequences import PublishFailure
from decode.state import DecodeState
from scheduler.policy.mixed_batching import MAX_PREEMPTIONS
from tests.decode.states import end_step, kinds, make_state, owner_of, start


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
