"""Sequences that ran in the instance's decode room and go on elsewhere: what this room does with their KV."""

import pytest

from common.errors import Overloaded, RequestCancelled
from common.ids import RequestId
from common.kv.blocks import BlockOwner
from common.messages import ErrorReply
from common.sequences import PublishFailure
from prefill import events
from prefill.state import PrefillState
from tests.prefill.states import (
    DECODE,
    HOME,
    LIFE,
    TOKEN,
    arrive,
    check_empty,
    delivered,
    handle,
    make_state,
    offered,
    only,
    owner_of,
    pull_of,
    sent,
)
from tests.requests import make_request

HELD_BY = BlockOwner("handed-on", RequestId("r1"), 0)


def leave(state: PrefillState) -> list[events.PrefillCommand]:
    """Five prompt tokens and three drawn, of which the last has no KV yet: that fills two blocks of four."""
    state.blocks.try_allocate(HELD_BY, 3)
    request = make_request("r1", 5, 9, output_ids=(7, 8, 9))
    return handle(state, events.SequenceLeft(HELD_BY, request, DECODE, LIFE, None))


def test_a_sequence_that_ran_here_is_handed_over_with_all_its_kv_and_nothing_is_computed() -> None:
    state = make_state()
    task = only(leave(state), events.OfferSequence).task
    assert (task.request.output_ids, task.kv_tokens, task.is_early) == ((7, 8, 9), 7, False)
    assert (state.moving, state.handovers_waiting, state.pending_tokens) == (1, 1, 0)
    send = only(handle(state, events.PullArrived(pull_of("r1"))), events.SendKV)
    assert send.source_blocks == (0, 1)
    answer = delivered(handle(state, sent("r1")))
    assert (answer.is_last, answer.first_token) == (True, 9)
    check_empty(state)


def test_a_prompt_that_came_twice_is_forgotten_when_its_sequence_leaves_from_here() -> None:
    """It waits behind another one's chunk, and nobody but this room knows of it."""
    state = make_state(chunk_tokens=4)
    arrive(state, "first", 8)
    arrive(state, "r1", 5)
    task = only(leave(state), events.OfferSequence).task
    assert (task.request.output_ids, task.kv_tokens) == ((7, 8, 9), 7)
    assert (state.moving, state.pending_requests) == (1, 1)
    handle(state, events.PullArrived(pull_of("r1")))
    handle(state, sent("r1"))
    handle(state, events.ChunkFinished((None,)))
    handle(state, events.ChunkFinished((TOKEN,)))
    handle(state, events.CancelArrived(RequestId("first"), 0))
    check_empty(state)


def test_one_that_is_sought_a_home_for_is_forgotten_too_and_its_new_home_means_nobody() -> None:
    state = make_state()
    offered(state)
    full = ErrorReply(Overloaded.code, "full")
    assert only(handle(state, events.OfferRefused(owner_of("r1"), full)), events.SeekDecode)
    assert only(leave(state), events.OfferSequence).decode_instance == DECODE
    assert handle(state, events.DecodeFound(owner_of("r1"), HOME)) == []


def test_where_a_decode_instance_was_offered_the_same_attempt_both_end_and_it_is_computed_again() -> None:
    """What is pulled could be either one's KV."""
    state = make_state()
    offered(state)
    commands = leave(state)
    assert [type(command) for command in commands] == [events.WithdrawOffer, PublishFailure]
    failure = only(commands, PublishFailure).failure
    assert (failure.attempt, failure.can_continue) == (0, True)
    check_empty(state)
    with pytest.raises(RequestCancelled):
        handle(state, events.PullArrived(pull_of("r1")))


def test_where_the_same_attempt_is_being_computed_or_sent_its_blocks_are_kept_until_that_has_ended() -> None:
    computing, sending = make_state(), make_state()
    arrive(computing, "r1", 5)
    offered(sending)
    handle(sending, events.PullArrived(pull_of("r1")))
    for state, ended in ((computing, events.ChunkFinished((TOKEN,))), (sending, sent("r1"))):
        assert only(leave(state), PublishFailure).failure.can_continue
        assert state.blocks.free_blocks < 8
        handle(state, ended)
        check_empty(state)
