"""Chunks that follow one another through the stages of a pipeline."""

import pytest

from prefill import events
from prefill.state import PrefillState
from tests.prefill.states import TOKEN, arrive, handle, make_state, only


def computed(commands: list[events.PrefillCommand]) -> list[tuple[str, int, int]]:
    chunk = only(commands, events.RunChunk)
    return [(piece.owner.request_id, piece.start, piece.tokens) for piece in chunk.slices]


def is_begun(commands: list[events.PrefillCommand]) -> bool:
    return any(isinstance(each, events.RunChunk) for each in commands)


def advance(state: PrefillState) -> list[events.PrefillCommand]:
    return handle(state, events.ChunkAdvanced())


def test_the_next_chunk_begins_when_the_one_before_it_has_left_the_first_stage() -> None:
    state = make_state(total_blocks=16)
    assert computed(arrive(state, "a", 8)) == [("a", 0, 8)]
    assert not is_begun(arrive(state, "b", 8))
    assert computed(advance(state)) == [("b", 0, 8)]
    # They end in the order in which they began.
    ended = only(handle(state, events.ChunkFinished((TOKEN,))), events.PublishToken)
    assert ended.event.request_id == "a"
    ended = only(handle(state, events.ChunkFinished((TOKEN,))), events.PublishToken)
    assert ended.event.request_id == "b"


def test_a_prompt_is_in_one_stage_at_a_time_and_others_go_on_beside_it() -> None:
    state = make_state(total_blocks=16)
    assert computed(arrive(state, "long", 16)) == [("long", 0, 8)]
    arrive(state, "b", 5)
    assert computed(advance(state)) == [("b", 0, 5)]
    assert not is_begun(advance(state))
    # The second stage has done with it: it is its turn again, as it came first.
    assert computed(handle(state, events.ChunkFinished((None,)))) == [("long", 8, 8)]


def test_prompts_of_the_next_window_follow_while_those_of_the_last_are_computed() -> None:
    """A window of four that is all in flight has had its turn."""
    state = make_state(total_blocks=32, order="sjf")
    assert computed(arrive(state, "first", 8)) == [("first", 0, 8)]
    for request_id, tokens in (("a", 2), ("b", 2), ("c", 2), ("d", 2), ("e", 8)):
        arrive(state, request_id, tokens)
    assert [name for name, _, _ in computed(advance(state))] == ["a", "b", "c", "d"]
    assert computed(advance(state)) == [("e", 0, 8)]


def test_what_is_left_of_a_prompt_in_flight_is_forgotten_when_its_chunk_ends() -> None:
    state = make_state(total_blocks=16)
    arrive(state, "a", 8)
    arrive(state, "b", 8)
    advance(state)
    handle(state, events.CancelArrived(state.chunks.slices[0].owner.request_id, 0))
    assert len(state.sequences) == 2
    handle(state, events.ChunkFinished((TOKEN,)))
    assert [owner.request_id for owner in state.sequences] == ["b"]


def test_no_chunk_leaves_the_first_stage_twice() -> None:
    state = make_state(total_blocks=16)
    with pytest.raises(ValueError, match="0 are in flight"):
        advance(state)
    arrive(state, "a", 8)
    advance(state)
    with pytest.raises(ValueError, match="1 are in flight"):
        advance(state)
