"""Whose prompt is computed next, and how many tokens of each a chunk takes: events and commands."""

import pytest

from common.config import PrefillOrder
from common.ids import RequestId
from common.messages import SampledToken
from prefill import events
from tests.prefill.states import (
    EOS,
    TOKEN,
    arrive,
    handle,
    make_state,
    only,
)


def test_short_prompts_share_a_chunk_and_a_long_one_is_sliced_across_chunks() -> None:
    """TetriInfer 3.3.3 and Figure 7: prompts are merged and sliced into chunks of one size."""
    state = make_state()
    arrive(state, "busy", 8)
    for request_id, tokens in (("a", 3), ("b", 9), ("c", 2)):
        arrive(state, request_id, tokens)
    chunk = only(handle(state, events.ChunkFinished((TOKEN,))), events.RunChunk)
    assert [(piece.owner.request_id, piece.tokens) for piece in chunk.slices] == [("a", 3), ("b", 5)]
    chunk = only(handle(state, events.ChunkFinished((TOKEN, None))), events.RunChunk)
    assert [(piece.owner.request_id, piece.tokens) for piece in chunk.slices] == [("b", 4), ("c", 2)]


@pytest.mark.parametrize(("order", "expected"), [("fcfs", "abc"), ("sjf", "cab"), ("ljf", "bac")])
def test_a_window_is_ordered_by_its_policy(order: PrefillOrder, expected: str) -> None:
    state = make_state(total_blocks=100, chunk_tokens=100, order=order)
    arrive(state, "busy", 8)
    for request_id, tokens in (("a", 5), ("b", 9), ("c", 2)):
        arrive(state, request_id, tokens)
    chunk = only(handle(state, events.ChunkFinished((TOKEN,))), events.RunChunk)
    assert "".join(piece.owner.request_id for piece in chunk.slices) == expected


def test_nobody_overtakes_a_prompt_that_waits_for_memory() -> None:
    state = make_state(total_blocks=3, chunk_tokens=100)
    arrive(state, "first", 8)
    arrive(state, "large", 12)
    arrive(state, "small", 1)
    assert not any(
        isinstance(command, events.RunChunk) for command in handle(state, events.ChunkFinished((TOKEN,)))
    )
    chunk = only(handle(state, events.CancelArrived(RequestId("first"), 0)), events.RunChunk)
    assert [piece.owner.request_id for piece in chunk.slices] == ["large"]


def owners_of(commands: list[events.PrefillCommand]) -> list[tuple[str, int]]:
    return [(piece.owner.request_id, piece.tokens) for piece in only(commands, events.RunChunk).slices]


def test_by_what_is_left_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    """DistServe's convoy, 4.3: the long one, which has begun, goes on when the short one is done."""
    state = make_state(order="srpt", total_blocks=16)
    assert owners_of(arrive(state, "long", 20)) == [("long", 8)]
    arrive(state, "short", 3)
    assert owners_of(handle(state, events.ChunkFinished((None,)))) == [("short", 3), ("long", 5)]
    assert owners_of(handle(state, events.ChunkFinished((TOKEN, None)))) == [("long", 7)]


def test_by_what_is_left_whoever_has_waited_long_enough_comes_first() -> None:
    """10 tokens a second: after 2 s the long one has no more left than one that has just come."""
    state = make_state(order="srpt", total_blocks=32)
    arrive(state, "first", 8)
    arrive(state, "long", 24)
    for number, now in enumerate((0.5, 1.0, 1.5)):
        arrive(state, f"short{number}", 8, now=now)
        [(name, _)] = owners_of(handle(state, events.ChunkFinished((TOKEN,)), now))
        assert name == f"short{number}"
    arrive(state, "short3", 8, now=2.0)
    [(name, _)] = owners_of(handle(state, events.ChunkFinished((TOKEN,)), 2.0))
    assert name == "long"


def test_without_blocks_for_the_shortest_those_that_have_theirs_go_on() -> None:
    state = make_state(order="srpt", total_blocks=5)
    arrive(state, "long", 17)
    arrive(state, "short", 2)
    assert owners_of(handle(state, events.ChunkFinished((None,)))) == [("long", 8)]


@pytest.mark.parametrize("order", ["fcfs", "srpt"])
def test_a_class_with_a_head_start_goes_first_but_not_before_those_that_came_long_ago(
    order: PrefillOrder,
) -> None:
    state = make_state(order=order, total_blocks=32)
    arrive(state, "running", 8)
    arrive(state, "long ago", 8, now=1.0)
    arrive(state, "ordinary", 8, now=9.0)
    arrive(state, "urgent", 8, now=10.0, head_start_s=2.0)
    begun = []
    for now in (11.0, 12.0, 13.0):
        commands = handle(state, events.ChunkFinished((TOKEN,)), now)
        begun += [piece.owner.request_id for piece in only(commands, events.RunChunk).slices]
    assert begun == ["long ago", "urgent", "ordinary"]


def test_batches_near_saturation_have_whole_prompts_and_long_ones_alone() -> None:
    """DistServe 4.3: short prompts together, nobody waits beside a long one."""
    state = make_state(total_blocks=40, chunk_tokens=8, batching="saturation")
    for request_id, tokens in (("r1", 2), ("r2", 3), ("r3", 4), ("r4", 20), ("r5", 1)):
        arrive(state, request_id, tokens, 1)
    batches, queue_s = [[("r1", 2)]], []
    for now in range(1, 5):
        commands = handle(state, events.ChunkFinished((SampledToken(EOS),) * len(batches[-1])), float(now))
        queue_s += [each.queue_s for each in commands if isinstance(each, events.PublishToken)]
        for command in commands:
            if isinstance(command, events.RunChunk):
                batches.append([(piece.owner.request_id, piece.tokens) for piece in command.slices])
    assert batches == [[("r1", 2)], [("r2", 3), ("r3", 4)], [("r4", 20)], [("r5", 1)]]
    assert queue_s == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert state.is_idle
