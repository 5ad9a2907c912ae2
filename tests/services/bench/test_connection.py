"""Addresses and the bytes of a request."""

import pytest

from common.errors import ConfigError
from services.bench.connection import Target, encode_request, parse_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://localhost:8000", Target("localhost", 8000, False, "")),
        ("http://localhost:8000/v1/", Target("localhost", 8000, False, "")),
        ("10.0.0.7:9000", Target("10.0.0.7", 9000, False, "")),
        ("https://api.example.com/llm/v1", Target("api.example.com", 443, True, "/llm")),
        ("http://[::1]:80/", Target("::1", 80, False, "")),
    ],
)
def test_urls_are_read_with_and_without_v1(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://", "http://h:99999", "http://me@h", "http://h/?a=b"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        parse_url(url)


def test_a_request_carries_its_length_and_the_key() -> None:
    wire = encode_request(Target("::1", 81, False, "/llm"), "POST", "/v1/completions", b"{}", "secret")
    head, _, body = wire.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /llm/v1/completions HTTP/1.1"
    assert {b"Host: [::1]:81", b"Content-Length: 2", b"Authorization: Bearer secret"} <= set(lines)
    assert body == b"{}"
    assert b"Authorization" not in encode_request(Target("h", 1, False, ""), "GET", "/", b"", None)
