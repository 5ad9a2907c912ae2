"""What is said of a body that is too large or too slow: the setting that says so, where there is one."""

import asyncio

import pytest

from common.errors import DeadlineExceeded, RequestError
from gateway.errors import PayloadTooLarge
from gateway.exchange import BodyLimits, new_exchange

CONFIGURED = BodyLimits(8, 0.05, "gateway.max_body_bytes", "gateway.body_timeout_s")
CONSTANT = BodyLimits(8, 0.05)


def read(limits: BodyLimits, *parts: bytes, length: int | None = None) -> bytes:
    """A body that comes in ``parts`` and then stops, with the ``length`` that its client declares."""
    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "headers": headers}
    left = list(parts)

    async def receive() -> dict[str, object]:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    async def send(message: object) -> None:
        raise AssertionError(f"nothing is answered while a body is read: {message}")

    return asyncio.run(new_exchange(scope, receive, send).read_json(limits))


@pytest.mark.parametrize(
    ("limits", "parts", "length", "error", "said"),
    [
        (CONFIGURED, [], 9, PayloadTooLarge, "the body has 9 bytes, over gateway.max_body_bytes = 8"),
        (CONFIGURED, [b"12345", b"6789"], None, PayloadTooLarge, "is over gateway.max_body_bytes = 8"),
        (CONFIGURED, [b"1"], None, DeadlineExceeded, "complete within gateway.body_timeout_s = 0.05"),
        (CONSTANT, [], 9, PayloadTooLarge, "the body has 9 bytes, over the 8 bytes that are read here"),
        (CONSTANT, [b"12345", b"6789"], None, PayloadTooLarge, "is over the 8 bytes that are read here"),
        (CONSTANT, [b"1"], None, DeadlineExceeded, "the body was not complete within 0.05 s"),
    ],
)
def test_a_bound_is_called_by_the_setting_that_changes_it(
    limits: BodyLimits, parts: list[bytes], length: int | None, error: type[RequestError], said: str
) -> None:
    with pytest.raises(error) as refused:
        read(limits, *parts, length=length)
    assert refused.value.message.endswith(said)
