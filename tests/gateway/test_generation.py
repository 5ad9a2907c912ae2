"""One choice's tokens on their way to text: whatever repeats, is superseded or breaks off, the text is what
an undisturbed sequence would have given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoverFailed, Overloaded
from common.ids import GatewayId, RequestId
from common.messages import FinishReason, GenerationRequest, SampledToken, SamplingParams, TokenEvent
from common.model.default_model import default_model_directory
from common.model.tokens import Detokenizer, Tokenizer
from gateway.generation import Generation
from gateway.stop_strings import StopStrings
from tests.gateway.conftest import CACHE

TOKENIZER = Tokenizer(default_model_directory(CACHE))
REQUEST_ID = RequestId("request")
END_TOKEN = 2


def generation(*stops: str, include: bool = False) -> Generation:
    return Generation(
        index=0,
        request=GenerationRequest(
            request_id=REQUEST_ID,
            gateway_id=GatewayId("gateway"),
            prompt_ids=(1,),
            sampling=SamplingParams(max_tokens=100),
        ),
        detokenizer=Detokenizer(TOKENIZER),
        stops=StopStrings(stops, include_in_output=include),
    )


def token(index: int, token_id: int, finish: FinishReason | None = None, attempt: int = 0) -> TokenEvent:
    return TokenEvent(REQUEST_ID, attempt, index, SampledToken(token_id), finish)


def feed(target: Generation, token_ids: list[int], finish: FinishReason = "length") -> str:
    """All tokens; the text that was read after each."""
    texts = []
    for index, token_id in enumerate(token_ids):
        target.take(token(index, token_id, finish if index == len(token_ids) - 1 else None))
        if piece := target.read():
            texts.append(piece.text)
    return "".join(texts)


@settings(deadline=None)
@given(st.lists(st.integers(3, TOKENIZER.vocab_size - 1), min_size=1, max_size=20))
def test_text_read_token_by_token_is_the_text_of_all(token_ids: list[int]) -> None:
    target = generation()
    assert feed(target, token_ids) == TOKENIZER.decode(token_ids)
    assert target.finish_reason == "length"
    assert target.output_ids == token_ids


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(TOKENIZER.encode("abba ab\nba stop")), min_size=1, max_size=20),
    st.lists(st.sampled_from(["ab", "ba", "b\n", "stop", "a s"]), min_size=1, max_size=2),
    st.booleans(),
)
def test_stop_strings_act_on_text_not_on_tokens(
    token_ids: list[int], stops: list[str], include: bool
) -> None:
    whole = StopStrings(stops, include_in_output=include)
    expected = whole.push(TOKENIZER.decode(token_ids))
    expected += whole.flush()
    target = generation(*stops, include=include)
    assert feed(target, token_ids) == expected
    assert target.finish_reason == ("stop" if whole.is_found else "length")


def test_an_end_token_counts_and_is_no_text() -> None:
    hello = TOKENIZER.encode("Hello")
    target = generation()
    assert feed(target, [*hello, END_TOKEN], finish="stop") == "Hello"
    assert target.finish_reason == "stop"
    assert len(target.output_ids) == len(hello) + 1


def test_a_stop_string_with_the_last_token_is_a_stop() -> None:
    target = generation("there")
    assert feed(target, TOKENIZER.encode("Hello there"), finish="length") == "Hello "
    assert target.finish_reason == "stop"


def test_text_held_back_comes_with_the_end() -> None:
    target = generation("there!")
    assert feed(target, TOKENIZER.encode("Hello there"), finish="length") == "Hello there"
    assert target.finish_reason == "length"


@pytest.mark.parametrize(
    ("event", "verdict"),
    [
        (token(2, 50), "taken"),
        (token(1, 50), "stale"),
        (token(3, 50), "gap"),
        (token(2, 50, attempt=1), "stale"),
        (token(9, 50, attempt=1), "stale"),
    ],
)
def test_only_the_next_token_of_this_attempt_is_taken(event: TokenEvent, verdict: str) -> None:
    target = generation()
    target.take(token(0, 40))
    target.take(token(1, 41))
    assert target.take(event) == verdict
    assert len(target.output_ids) == (3 if verdict == "taken" else 2)


def test_nothing_is_taken_after_the_end() -> None:
    target = generation()
    target.take(token(0, 40, "length"))
    assert target.take(token(1, 41)) == "stale"
    assert target.take(token(7, 41)) == "stale"
    failed = generation()
    failed.fail(Overloaded("full"))
    assert failed.take(token(0, 40)) == "stale"


def test_the_first_error_stays_and_never_follows_an_end() -> None:
    target = generation()
    target.fail(Overloaded("first"))
    target.fail(HandoverFailed("second"))
    assert isinstance(target.error, Overloaded)
    finished = generation()
    finished.take(token(0, 40, "length"))
    finished.fail(Overloaded("late"))
    assert finished.error is None


@settings(deadline=None)
@given(st.data())
def test_a_sequence_continued_anywhere_gives_the_same_text(data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode("The quick 日本語 fox 👩‍👩‍👧 jumps")
    breaks = data.draw(st.lists(st.integers(0, len(token_ids) - 1), max_size=3).map(sorted))
    target = generation()
    place = 0
    for attempt, end in enumerate([*breaks, len(token_ids)]):
        assert target.request.output_ids == tuple(token_ids[:place])
        for index in range(place, end):
            finish: FinishReason | None = "length" if index == len(token_ids) - 1 else None
            assert target.take(token(index, token_ids[index], finish, attempt)) == "taken"
        place = end
        if end < len(token_ids):
            again = target.continue_elsewhere()
            assert (again.attempt, again.prompt_ids) == (attempt + 1, (1,))
    piece = target.read()
    assert piece is not None
    assert piece.text == TOKENIZER.decode(token_ids)
