"""Token streams read from bytes, cut wherever a socket may cut them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.stream import (
    LONGEST_LINE_BYTES,
    CompletionStream,
    StreamFault,
    Usage,
    read_error,
)

CHAT = (
    b': comment\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"He"},"finish_reason":null}],"usage":null,"error":null}\n\n'
    b'event: message\r\ndata: {"choices":[{"delta":{"content":"y \xc3\xa9"},"finish_reason":null}]}\r\n\r\n'
    b'data:{"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}\n\n'
    b"data: [DONE]\n\n"
)


def feed_all(*parts: bytes) -> CompletionStream:
    stream = CompletionStream()
    for now, part in enumerate(parts):
        stream.feed(part, float(now))
    stream.finish()
    return stream


def test_a_chat_has_a_token_for_each_piece_of_text_and_none_for_role_end_and_usage() -> None:
    stream = feed_all(CHAT)
    assert list(stream.token_times_s) == [0.0, 0.0]
    assert stream.usage == Usage(prompt_tokens=9, completion_tokens=2)
    assert stream.is_done
    assert stream.fault is None


@given(st.lists(st.integers(0, len(CHAT)), max_size=40).map(sorted))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *cuts, len(CHAT)]
    stream = feed_all(*(CHAT[start:end] for start, end in pairwise(edges)))
    assert len(stream.token_times_s) == 2
    assert list(stream.token_times_s) == sorted(stream.token_times_s)
    assert stream.usage == Usage(9, 2)
    assert stream.is_done
    assert stream.fault is None


@given(st.binary(max_size=300), st.integers(0, len(CHAT)))
def test_no_bytes_raise(garbage: bytes, position: int) -> None:
    stream = feed_all(CHAT[:position], garbage, CHAT[position:])
    assert (stream.fault is None) == (not stream.error_message)
    assert len(stream.token_times_s) <= (CHAT + garbage).count(b"data:")
    assert list(stream.token_times_s) == sorted(stream.token_times_s)


def test_a_token_whose_text_waits_for_more_bytes_counts_and_an_empty_end_does_not() -> None:
    stream = feed_all(
        b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"text":"\\u00e9","finish_reason":null}]}\n\n',
        b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n',
    )
    assert list(stream.token_times_s) == [0.0, 1.0]
    assert stream.has_finish
    assert not stream.is_done
    assert stream.fault is None


def test_reasoning_is_tokens_too() -> None:
    stream = feed_all(b'data: {"choices":[{"delta":{"reasoning_content":"Hm","role":"assistant"}}]}\n\n')
    assert len(stream.token_times_s) == 1


def test_an_error_event_ends_the_stream_with_its_message() -> None:
    stream = feed_all(
        b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
        b'data: {"error":{"message":"gone","code":"instance_lost"}}\n\n'
        b'data: {"choices":[{"text":"b","finish_reason":null}]}\n\ndata: [DONE]\n\n'
    )
    assert stream.fault is StreamFault.ERROR_EVENT
    assert stream.error_message == "instance_lost: gone"
    assert len(stream.token_times_s) == 1


def test_a_stream_without_an_end_is_truncated() -> None:
    stream = feed_all(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n')
    assert stream.fault is StreamFault.TRUNCATED


def test_an_endless_line_is_refused_before_it_fills_the_memory() -> None:
    stream = feed_all(b"data: " + b"x" * LONGEST_LINE_BYTES)
    assert stream.fault is StreamFault.MALFORMED_EVENT


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"no","type":"server_error","code":null}}', "server_error: no"),
        (b'{"error":{"message":"no","code":503}}', "503: no"),
        (b'{"message":"flat","code":"busy"}', "busy: flat"),
        (b'{"error":"a text"}', '{"error":"a text"}'),
        (b"<html>\xff", "<html>\ufffd"),
    ],
)
def test_error_bodies_of_several_servers_are_read(body: bytes, text: str) -> None:
    assert read_error(body) == text
