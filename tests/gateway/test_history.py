"""A request's timeline: what happened to it, where, and when."""

import pytest

from common.ids import InstanceId, RequestId
from common.messages import Work, WorkKind
from gateway.history import MOST_SPANS, History, Span

PREFILL, DECODE, NEXT = InstanceId("prefill-0"), InstanceId("decode-0"), InstanceId("decode-1")
ARRIVED_S = 100.0


def work(kind: WorkKind, took_s: float, attempt: int = 0) -> Work:
    peer = PREFILL if kind == "transfer" else None
    return Work(RequestId("r"), attempt, kind, took_s, tokens=7, kv_bytes=9, peer=peer)


def served() -> History:
    """Queued for 1 s and 0.5 s, two chunks, a first token, its KV moved, three steps."""
    history = History(ARRIVED_S)
    history.note_placed(ARRIVED_S + 1.0, PREFILL)
    history.note_work(ARRIVED_S + 2.0, PREFILL, work("prefill", 0.5))
    history.note_work(ARRIVED_S + 3.0, PREFILL, work("prefill", 1.0))
    history.note_token(ARRIVED_S + 3.0, PREFILL)
    history.note_work(ARRIVED_S + 3.5, DECODE, work("transfer", 0.25))
    for at_s in (4.0, 4.5, 5.0):
        history.note_token(ARRIVED_S + at_s, DECODE)
    return history


def times_of(spans: list[Span]) -> list[tuple[str, float, float | None, str | None]]:
    return [(span.kind, span.begin_s, span.end_s, span.instance) for span in spans]


def test_a_request_waits_is_computed_moved_and_decoded() -> None:
    history = served()
    history.note_end(ARRIVED_S + 5.25)
    spans = history.spans()
    assert times_of(spans) == [
        ("queue", 0.0, 1.0, None),
        ("queue", 1.0, 1.5, PREFILL),
        ("prefill", 1.5, 2.0, PREFILL),
        ("prefill", 2.0, 3.0, PREFILL),
        ("transfer", 3.25, 3.5, DECODE),
        ("decode", 3.5, 5.0, DECODE),
    ]
    assert spans[-1].step_ends_s == [4.0, 4.5, 5.0]
    assert (spans[-2].peer, spans[-2].kv_bytes, spans[2].tokens) == (PREFILL, 9, 7)


def test_what_still_lasts_has_no_end() -> None:
    history = History(ARRIVED_S)
    assert times_of(history.spans()) == [("queue", 0.0, None, None)]
    history.note_placed(ARRIVED_S + 1.0, PREFILL)
    assert times_of(history.spans())[-1] == ("queue", 1.0, None, PREFILL)
    assert times_of(served().spans())[-1] == ("decode", 3.5, None, DECODE)


def test_a_broken_request_recovers_until_its_next_token_and_is_computed_anew_meanwhile() -> None:
    history = served()
    history.note_broken(ARRIVED_S + 6.0, "instance_lost")
    history.attempt = 1
    assert history.is_broken
    assert not history.is_decoding
    history.note_placed(ARRIVED_S + 6.25, PREFILL)
    history.note_work(ARRIVED_S + 7.0, PREFILL, work("prefill", 0.5, attempt=1))
    history.note_token(ARRIVED_S + 7.0, PREFILL)
    history.note_token(ARRIVED_S + 7.5, NEXT)
    assert times_of(history.spans())[6:] == [
        ("recovery", 5.0, 7.0, None),
        ("queue", 6.0, 6.25, None),
        ("queue", 6.25, 6.5, PREFILL),
        ("prefill", 6.5, 7.0, PREFILL),
        ("decode", 7.0, None, NEXT),
    ]
    [recovery] = [span for span in history.spans() if span.kind == "recovery"]
    assert (recovery.cause, recovery.noticed_s) == ("instance_lost", 6.0), "a second after its last token"


def test_what_breaks_while_it_waits_or_is_computed_leaves_no_gap_either() -> None:
    waiting, computed = History(ARRIVED_S), History(ARRIVED_S)
    waiting.note_placed(ARRIVED_S + 1.0, PREFILL)
    for history in (waiting, computed):
        if history is computed:
            history.note_work(ARRIVED_S + 2.0, PREFILL, work("prefill", 0.5))
        history.note_broken(ARRIVED_S + 6.0, "instance_lost")
    assert times_of(waiting.spans())[1:3] == [("queue", 1.0, 6.0, PREFILL), ("queue", 6.0, None, None)]
    assert times_of(waiting.spans())[3] == ("recovery", 6.0, None, None)
    assert times_of(computed.spans())[2:] == [("recovery", 2.0, None, None), ("queue", 6.0, None, None)]


def test_what_breaks_again_before_its_next_token_recovers_once() -> None:
    history = served()
    for at_s in (6.0, 9.0):
        history.note_broken(ARRIVED_S + at_s, f"cause at {at_s}")
        history.attempt += 1
    history.note_token(ARRIVED_S + 10.0, NEXT)
    [recovery] = [span for span in history.spans() if span.kind == "recovery"]
    assert (recovery.begin_s, recovery.noticed_s, recovery.end_s) == (5.0, 6.0, 10.0)
    assert recovery.cause == "cause at 6.0"


def test_a_sequence_that_goes_on_elsewhere_has_a_stay_at_each_instance() -> None:
    history = served()
    assert history.note_token(ARRIVED_S + 6.0, NEXT)
    assert not history.note_token(ARRIVED_S + 6.5, NEXT)
    first, second = history.spans()[-2:]
    assert (first.instance, first.end_s) == (DECODE, 5.0)
    assert (second.instance, second.begin_s, second.step_ends_s) == (NEXT, 5.0, [6.0, 6.5])


def test_what_is_computed_where_it_is_decoded_begins_to_decode_with_its_second_token() -> None:
    history = History(ARRIVED_S)
    history.note_placed(ARRIVED_S + 1.0, PREFILL)
    history.note_work(ARRIVED_S + 2.0, PREFILL, work("prefill", 1.0))
    history.note_token(ARRIVED_S + 2.0, PREFILL)
    assert not history.is_decoding
    history.note_token(ARRIVED_S + 2.5, PREFILL)
    assert times_of(history.spans())[-1] == ("decode", 2.0, None, PREFILL)


def test_tokens_may_overtake_the_word_of_the_placement() -> None:
    history = History(ARRIVED_S)
    history.note_work(ARRIVED_S + 1.0, PREFILL, work("prefill", 0.5))
    history.note_token(ARRIVED_S + 1.0, PREFILL)
    history.note_token(ARRIVED_S + 1.5, DECODE)
    history.note_placed(ARRIVED_S + 2.0, PREFILL)
    assert [span.kind for span in history.spans()] == ["queue", "prefill", "decode"]


def test_a_request_that_ends_where_it_waits_or_recovers_leaves_nothing_open() -> None:
    waiting, broken = History(ARRIVED_S), served()
    broken.note_broken(ARRIVED_S + 6.0, "gap")
    for history in (waiting, broken):
        history.note_end(ARRIVED_S + 8.0)
        assert all(span.end_s is not None for span in history.spans())


def test_the_spans_of_a_request_are_bounded() -> None:
    history = History(ARRIVED_S)
    for step in range(2 * MOST_SPANS):
        history.note_work(ARRIVED_S + step, PREFILL, work("prefill", 0.5))
    assert len(history.spans()) == MOST_SPANS


@pytest.mark.parametrize("took_s", [0.5, 50.0])
def test_no_work_began_before_its_request_came(took_s: float) -> None:
    history = History(ARRIVED_S)
    history.note_work(ARRIVED_S + 1.0, PREFILL, work("prefill", took_s))
    assert min(span.begin_s for span in history.spans()) == 0.0
