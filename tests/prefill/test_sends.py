"""Whom the KV of a prompt goes to, when, and in which portions, as events and commands."""

import msgspec
import pytest

from common.errors import (
    InstanceLost,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    UnknownRequest,
)
from common.ids import Incarnation, RequestId
from common.kv.layout import KVSpan
from common.messages import ErrorReply, KVDelivered, SampledToken
from common.sequences import PublishFailure
from prefill import events
from prefill.state import PrefillState
from tests.prefill.states import (
    DECODE,
    EOS,
    FAILED,
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


def test_blocks_stay_pinned_until_no_byte_is_in_the_air() -> None:
    state = make_state()
    offered(state)
    send = only(handle(state, events.PullArrived(pull_of("r1"))), events.SendKV)
    assert (send.source_blocks, send.spans) == ((0,), (KVSpan(range(3), range(4)),))
    assert only(handle(state, events.CancelArrived(RequestId("r1"), 0)), events.WithdrawOffer)
    assert state.blocks.free_blocks == 7
    answer = only(handle(state, sent("r1")), events.AnswerPull).answer
    assert isinstance(answer, ErrorReply)
    assert answer.code == RequestCancelled.code
    check_empty(state)


def test_kv_waits_from_its_computation_until_its_first_portion_is_asked_for() -> None:
    state = make_state()
    arrive(state, "r1")
    handle(state, events.ChunkFinished((TOKEN,)), now=2.0)
    pull = pull_of("r1", max_bytes=4)
    assert only(handle(state, events.PullArrived(pull), now=2.5), events.HandOverBegun).queue_s == 0.5
    handle(state, sent("r1"), now=3.0)
    again = handle(state, events.PullArrived(pull_of("r1", portion=1)), now=4.0)
    assert not [each for each in again if isinstance(each, events.HandOverBegun)]


def test_a_refused_offer_goes_back_to_the_gateway_and_names_a_lost_instance() -> None:
    state = make_state()
    offered(state)
    commands = handle(state, events.OfferRefused(owner_of("r1"), FAILED, is_lost=True))
    failure = only(commands, PublishFailure).failure
    assert failure.can_continue
    assert failure.lost_instance == DECODE
    assert state.blocks.free_blocks == 8


def test_pulling_what_is_not_here_is_refused_and_changes_nothing() -> None:
    state = make_state()
    offered(state)
    for pull in (pull_of("other"), pull_of("r1", blocks=0)):
        with pytest.raises(UnknownRequest):
            handle(state, events.PullArrived(pull))
        state.check()
    assert state.handovers_waiting == 1


def layerwise(tokens: int = 12, chunk_tokens: int = 8) -> PrefillState:
    """A prompt of more than a chunk, offered, its first chunk in flight."""
    state = make_state(chunk_tokens=chunk_tokens, layerwise_min_tokens=8)
    commands = arrive(state, "r1", tokens)
    offer = only(commands, events.OfferSequence)
    assert (offer.task.is_early, offer.task.request.output_ids, offer.task.kv_tokens) == (True, (), tokens)
    assert only(commands, events.RunChunk).report_every is not None
    return state


def test_a_long_prompts_kv_follows_its_computation_layer_by_layer() -> None:
    """Splitwise 4.4; the first token comes with the last of the KV."""
    state = layerwise()
    assert handle(state, events.PullArrived(pull_of("r1", 3))) == [events.HandOverBegun(0.0)]
    [send] = handle(state, events.LayersComputed(1))
    assert isinstance(send, events.SendKV)
    assert send.spans == (KVSpan(range(1), range(8)),)
    assert handle(state, events.LayersComputed(2)) == []
    handle(state, events.LayersComputed(3))
    assert delivered(handle(state, sent("r1"))) == KVDelivered(24, 0.5, is_last=False)
    [send] = handle(state, events.PullArrived(pull_of("r1", 3, portion=1)))
    assert isinstance(send, events.SendKV)
    assert send.spans == (KVSpan(range(1, 3), range(8)),)
    handle(state, events.ChunkFinished((None,)))
    assert not delivered(handle(state, sent("r1"))).is_last
    assert handle(state, events.PullArrived(pull_of("r1", 3, portion=2))) == []
    send = only(handle(state, events.LayersComputed(3)), events.SendKV)
    assert send.spans == (KVSpan(range(3), range(8, 12)),)
    assert handle(state, sent("r1")) == [], "the first token is still to come"
    answer = delivered(handle(state, events.ChunkFinished((TOKEN,))))
    assert (answer.is_last, answer.first_token) == (True, 7)
    check_empty(state)


def test_a_portion_holds_no_more_than_was_asked_for_and_is_not_sent_twice() -> None:
    state = make_state()
    arrive(state, "r1", 7)
    handle(state, events.ChunkFinished((TOKEN,)))
    spans = []
    portion = 0
    answer = None
    while answer is None or not answer.is_last:
        pull = pull_of("r1", portion=portion, max_bytes=19)
        send = only(handle(state, events.PullArrived(pull)), events.SendKV)
        spans.append(send.spans)
        answer = delivered(handle(state, sent("r1")))
        if not answer.is_last:
            assert delivered(handle(state, events.PullArrived(pull))) == answer
            with pytest.raises(UnknownRequest, match="portion 9"):
                handle(state, events.PullArrived(pull_of("r1", portion=9)))
        portion += 1
    assert spans == [
        (KVSpan(range(1), range(7)), KVSpan(range(1, 2), range(2))),
        (KVSpan(range(1, 2), range(2, 7)), KVSpan(range(2, 3), range(4))),
        (KVSpan(range(2, 3), range(4, 7)),),
    ]


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_early_offer_that_came_too_early_is_made_again_with_the_first_token(is_in_time: bool) -> None:
    state = layerwise(8)
    refused = events.OfferRefused(owner_of("r1"), ErrorReply(Overloaded.code, "full"), is_early=True)
    if is_in_time:
        assert handle(state, refused) == []
        with pytest.raises(UnknownRequest, match="has not been offered"):
            handle(state, events.PullArrived(pull_of("r1")))
        commands = handle(state, events.ChunkFinished((TOKEN,)))
    else:
        assert len(handle(state, events.ChunkFinished((TOKEN,)))) == 1
        commands = handle(state, refused)
    task = only(commands, events.OfferSequence).task
    assert (task.is_early, task.request.output_ids) == (False, (7,))
    assert only(handle(state, events.PullArrived(pull_of("r1"))), events.SendKV)


def test_short_prompts_and_those_of_one_token_to_draw_are_not_offered_early() -> None:
    for tokens, max_tokens in ((7, 8), (8, 1)):
        state = make_state(layerwise_min_tokens=8)
        [chunk] = arrive(state, "r1", tokens, max_tokens)
        assert isinstance(chunk, events.RunChunk)
        assert chunk.report_every is None


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_sequence_that_its_first_token_ends_is_withdrawn_and_its_pull_answered(is_asked: bool) -> None:
    state = layerwise(8)
    if is_asked:
        handle(state, events.PullArrived(pull_of("r1")))
    commands = handle(state, events.ChunkFinished((SampledToken(EOS),)))
    assert only(commands, events.WithdrawOffer).decode_instance == DECODE
    answers = [each.answer for each in commands if isinstance(each, events.AnswerPull)]
    assert [each.code for each in answers if isinstance(each, ErrorReply)] == (
        [RequestCancelled.code] if is_asked else []
    )
    with pytest.raises(RequestCancelled, match="has ended"):
        handle(state, events.PullArrived(pull_of("r1")))
    check_empty(state)


def test_what_ends_while_kv_is_in_the_air_is_answered_when_it_is_not() -> None:
    for ending in (
        events.ChunkFailed(FAILED),
        events.ChunkFinished((SampledToken(EOS),)),
        events.CancelArrived(RequestId("r1"), 0),
        events.DrainExpired(),
        events.DecodeInstanceGone(DECODE, LIFE),
    ):
        state = layerwise(8)
        handle(state, events.PullArrived(pull_of("r1")))
        handle(state, events.LayersComputed(1))
        commands = handle(state, ending)
        assert not [each for each in commands if isinstance(each, events.AnswerPull)]
        assert state.blocks.free_blocks == 6
        assert only(handle(state, sent("r1")), events.AnswerPull)
        if state.sequences:
            handle(state, events.ChunkFinished((TOKEN,)))
        check_empty(state)


def test_a_portion_that_fails_ends_the_sequence_and_leaves_the_news_to_the_decode_instance() -> None:
    state = layerwise()
    handle(state, events.PullArrived(pull_of("r1", 3)))
    handle(state, events.LayersComputed(2))
    [answer] = handle(state, events.SendFailed(owner_of("r1"), FAILED))
    assert answer == events.AnswerPull(owner_of("r1"), 0, FAILED)
    assert handle(state, events.ChunkFinished((None,))) == []
    check_empty(state)


def test_a_pull_for_an_earlier_life_or_into_impossible_blocks_is_refused() -> None:
    state = make_state()
    offered(state)
    pull = pull_of("r1")
    for wrong, refusal in (
        (msgspec.structs.replace(pull, prefill_incarnation=Incarnation("i0")), InstanceLost),
        (msgspec.structs.replace(pull, blocks=(0, 60)), InvalidRequest),
        (msgspec.structs.replace(pull, blocks=(0, -1)), InvalidRequest),
        (msgspec.structs.replace(pull, blocks=(1, 1)), InvalidRequest),
    ):
        with pytest.raises(refusal):
            handle(state, events.PullArrived(wrong))
    handle(state, events.PullArrived(pull))


def test_what_is_pushed_goes_on_part_by_part_without_being_asked_and_is_answered_once() -> None:
    state = layerwise()
    handle(state, events.PullArrived(pull_of("r1", 3, max_bytes=None)))
    first = only(handle(state, events.LayersComputed(1)), events.SendKV)
    assert handle(state, events.LayersComputed(3)) == [], "one transfer of a sequence at a time"
    second = only(handle(state, sent("r1")), events.SendKV)
    handle(state, events.ChunkFinished((None,)))
    assert handle(state, sent("r1")) == [], "all that is there has been sent"
    third = only(handle(state, events.LayersComputed(3)), events.SendKV)
    assert [send.spans for send in (first, second, third)] == [
        (KVSpan(range(1), range(8)),),
        (KVSpan(range(1, 3), range(8)),),
        (KVSpan(range(3), range(8, 12)),),
    ]
    assert handle(state, sent("r1")) == [], "the first token is still to come"
    answer = delivered(handle(state, events.ChunkFinished((TOKEN,))))
    assert answer == KVDelivered(3 * 24, 3 * 0.5, is_last=True, first_token=7)
    check_empty(state)
