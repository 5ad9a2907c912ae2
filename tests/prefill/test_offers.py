"""What becomes of a computed prompt that its decode instance refuses, as events and commands."""

import pytest

from common.errors import NoInstanceReady, Overloaded
from common.ids import RequestId
from common.messages import ErrorReply, SequenceMoved
from common.sequences import PublishFailure
from prefill import events
from prefill.offers import MAX_REFUSALS, NO_ROOM, STUCK_AFTER_S
from prefill.state import PrefillState
from tests.prefill.states import (
    DECODE,
    HOME,
    LIFE,
    arrive,
    check_empty,
    handle,
    make_state,
    offered,
    only,
    owner_of,
    pull_of,
)
from tests.requests import GATEWAY

DRAINING = ErrorReply(NoInstanceReady.code, "instance decode-0 admits no sequences now")
FULL = ErrorReply(Overloaded.code, "full")


def refused(state: PrefillState, error: ErrorReply = DRAINING) -> list[events.PrefillCommand]:
    return handle(state, events.OfferRefused(owner_of("r1"), error))


@pytest.mark.parametrize("error", [DRAINING, FULL])
def test_a_computed_prompt_that_is_refused_goes_to_another_instance_with_its_kv(error: ErrorReply) -> None:
    """Not computed again: decode-0 began to drain between the placement and the offer, or is full."""
    state = make_state()
    offered(state)
    [seek] = refused(state, error)
    assert isinstance(seek, events.SeekDecode)
    assert (seek.refused, seek.request.output_ids) == (DECODE, (7,))
    assert state.blocks.free_blocks == 7
    move, offer = handle(state, events.DecodeFound(owner_of("r1"), HOME))
    assert move == events.PublishMove(GATEWAY, SequenceMoved(RequestId("r1"), 0, HOME, output_tokens=1))
    assert isinstance(offer, events.OfferSequence)
    assert (offer.decode_instance, offer.task.request.output_ids) == (HOME.decode_instance, (7,))
    assert only(handle(state, events.PullArrived(pull_of("r1"))), events.SendKV)


def test_where_nobody_else_is_ready_the_sequence_goes_back_to_the_gateway() -> None:
    state = make_state()
    offered(state)
    refused(state)
    failure = only(handle(state, events.DecodeNotFound(owner_of("r1"), DRAINING)), PublishFailure).failure
    assert (failure.error, failure.can_continue) == (DRAINING, True)
    check_empty(state)


def test_one_that_everybody_refuses_is_given_up_after_a_few_times() -> None:
    state = make_state()
    offered(state)
    for _ in range(MAX_REFUSALS):
        assert only(refused(state, FULL), events.SeekDecode)
        handle(state, events.DecodeFound(owner_of("r1"), HOME))
    assert only(refused(state, FULL), PublishFailure).failure.can_continue
    check_empty(state)


@pytest.mark.parametrize(
    "end", [events.CancelArrived(RequestId("r1"), 0), events.DecodeInstanceGone(DECODE, LIFE)]
)
def test_what_ends_while_another_instance_is_sought_is_neither_offered_nor_withdrawn(
    end: events.PrefillEvent,
) -> None:
    state = make_state()
    offered(state)
    refused(state)
    assert handle(state, end) == []
    check_empty(state)
    assert handle(state, events.DecodeFound(owner_of("r1"), HOME)) == []
    assert handle(state, events.DecodeNotFound(owner_of("r1"), DRAINING)) == []


def test_an_offer_made_early_that_is_refused_waits_for_the_first_token() -> None:
    state = make_state(layerwise_min_tokens=8)
    assert only(arrive(state, "r1", 8), events.OfferSequence)
    early = events.OfferRefused(owner_of("r1"), DRAINING, is_early=True)
    assert handle(state, early) == []


def test_what_a_decode_instance_has_not_begun_with_goes_where_it_is_wanted() -> None:
    state = make_state()
    offered(state)
    [seek] = handle(state, events.OfferDeclined(owner_of("r1"), DECODE, HOME.decode_instance))
    assert isinstance(seek, events.SeekDecode)
    assert (seek.wanted, seek.refused) == (HOME.decode_instance, DECODE)
    assert seek.request.output_ids == (7,)
    _, offer = handle(state, events.DecodeFound(owner_of("r1"), HOME))
    assert isinstance(offer, events.OfferSequence)
    assert offer.decode_instance == HOME.decode_instance


def test_who_was_not_offered_a_sequence_or_has_asked_for_its_kv_cannot_decline_it() -> None:
    state = make_state()
    offered(state)
    other = events.OfferDeclined(owner_of("r1"), HOME.decode_instance, DECODE)
    assert not handle(state, other)
    assert not handle(state, events.OfferDeclined(owner_of("r2"), DECODE, HOME.decode_instance))
    handle(state, events.PullArrived(pull_of("r1")))
    assert not handle(state, events.OfferDeclined(owner_of("r1"), DECODE, HOME.decode_instance))


def test_where_nobody_can_be_decoded_here_for_long_the_latest_that_waits_for_others_gives_its_memory() -> (
    None
):
    state = make_state()
    offered(state, "r1")
    offered(state, "r2")
    state.mates.note_stuck(is_stuck=True, now=10.0)
    assert not handle(state, events.TimePassed(), now=10.0 + STUCK_AFTER_S - 0.1)
    commands = handle(state, events.TimePassed(), now=10.0 + STUCK_AFTER_S)
    failure = only(commands, PublishFailure).failure
    assert (failure.request_id, failure.error, failure.can_continue) == ("r2", NO_ROOM, True)
    assert only(commands, events.WithdrawOffer).owner == owner_of("r2")
    assert list(state.sequences) == [owner_of("r1")]
    handle(state, events.PullArrived(pull_of("r1")))
    assert not handle(state, events.TimePassed(), now=99.0), "what is being sent is not given up"
