"""Addresses as users write them."""

import pytest

from common.errors import ConfigError
from services.server_url import Target, parse_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://localhost:8000", Target("localhost", 8000, False, "")),
        ("http://localhost:8000/v1/", Target("localhost", 8000, False, "")),
        (" localhost:8000 ", Target("localhost", 8000, False, "")),
        ("10.0.0.7:9000", Target("10.0.0.7", 9000, False, "")),
        ("HTTP://Host", Target("host", 80, False, "")),
        ("https://api.example.com/llm/v1", Target("api.example.com", 443, True, "/llm")),
        ("http://h/v1/chat/completions", Target("h", 80, False, "")),
        ("http://h/llm/v1/completions/", Target("h", 80, False, "/llm")),
        ("http://[::1]:80/", Target("::1", 80, False, "")),
    ],
)
def test_urls_are_read_with_and_without_scheme_slash_and_v1(url: str, target: Target) -> None:
    assert parse_url(url) == target
    assert parse_url(target.base_url) == target


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://host", "http://", "http://h:99999", "http://h:0", "http://h:x", "http://me@h"),
        *("http://@h", "http://h/?a=b", "http://h/#top", "http://[::1", "http://a b", "http://h/a b", "/v1"),
        *("http://h/\u00e9", "localhost:8000:1"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        parse_url(url)
