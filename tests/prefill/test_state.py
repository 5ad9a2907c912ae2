"""The prefill room's decisions, as events and commands."""

import pytest

from common.errors import (
    NoInstanceReady,
)
from common.ids import Incarnation
from common.messages import SampledToken
from prefill import events
from tests.prefill.states import (
    DECODE,
    EOS,
    LIFE,
    TOKEN,
    arrive,
    check_empty,
    handle,
    make_state,
    only,
    owner_of,
    sent,
)


def test_a_prompt_is_computed_in_chunks_and_offered_with_its_first_token() -> None:
    state = make_state()
    first = only(arrive(state, "r1", 12), events.RunChunk)
    assert [(piece.start, piece.tokens, piece.is_last) for piece in first.slices] == [(0, 8, False)]
    second = only(handle(state, events.ChunkFinished((None,))), events.RunChunk)
    assert [(piece.start, piece.tokens, piece.is_last) for piece in second.slices] == [(8, 4, True)]
    commands = handle(state, events.ChunkFinished((TOKEN,)), now=3.0)
    published = only(commands, events.PublishToken)
    assert (published.event.index, published.event.token, published.event.finish_reason) == (0, TOKEN, None)
    offer = only(commands, events.OfferSequence)
    assert offer.task.request.output_ids == (7,)
    assert offer.task.kv_tokens == 12
    assert state.handovers_waiting == 1


def test_a_sequence_that_ends_with_its_first_token_is_never_offered() -> None:
    for ending in (SampledToken(EOS), TOKEN):
        state = make_state()
        arrive(state, "r1", max_tokens=1 if ending == TOKEN else 9)
        commands = handle(state, events.ChunkFinished((ending,)))
        reason = only(commands, events.PublishToken).event.finish_reason
        assert reason == ("length" if ending == TOKEN else "stop")
        assert len(commands) == 1
        check_empty(state)


def test_word_that_an_earlier_life_of_the_decode_instance_is_gone_changes_nothing() -> None:
    state = make_state()
    arrive(state, "r1")
    assert handle(state, events.DecodeInstanceGone(DECODE, Incarnation("d0"))) == []
    offer = handle(state, events.ChunkFinished((TOKEN,)))[-1]
    assert isinstance(offer, events.OfferSequence)
    handle(state, events.DecodeInstanceGone(DECODE, LIFE))
    check_empty(state)


def test_an_instance_of_another_role_finishes_its_prompts_and_takes_none_until_it_is_back() -> None:
    state = make_state()
    arrive(state, "r1")
    handle(state, events.RoleChanged(is_prefill=False))
    with pytest.raises(NoInstanceReady):
        arrive(state, "r2")
    assert only(handle(state, events.ChunkFinished((TOKEN,))), events.OfferSequence).owner == owner_of("r1")
    handle(state, events.RoleChanged(is_prefill=True))
    arrive(state, "r2")
    assert owner_of("r2") in state.sequences


def test_an_illegal_end_of_chunk_raises_and_changes_nothing() -> None:
    state = make_state()
    arrive(state, "r1")
    for event in (
        events.ChunkFinished((TOKEN, TOKEN)),
        events.ChunkFinished((None,)),
        sent("r1"),
        events.LayersComputed(4),
    ):
        with pytest.raises(ValueError, match=r"r1|slices"):
            handle(state, event)
        state.check()
    assert handle(state, events.ChunkFinished((TOKEN,)))
