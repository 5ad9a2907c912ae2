"""The bytes of a request."""

from services.bench.connection import encode_request
from services.server_url import Target


def test_a_request_carries_its_length_and_the_key() -> None:
    wire = encode_request(Target("::1", 81, False, "/llm"), "POST", "/v1/completions", b"{}", "secret")
    head, _, body = wire.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /llm/v1/completions HTTP/1.1"
    assert {b"Host: [::1]:81", b"Content-Length: 2", b"Authorization: Bearer secret"} <= set(lines)
    assert body == b"{}"
    assert b"Authorization" not in encode_request(Target("h", 1, False, ""), "GET", "/", b"", None)
