"""One HTTP request and its answer, over ASGI, with what ASGI leaves to the application.

A body and its time are bounded; the client is watched for leaving, because servers tell only whoever asks; a
client that stops reading is noticed and cut. Once headers of a stream are out, its events may go straight to
the connection (``gateway.protocol``) as long as no write waits.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.errors import DeadlineExceeded, RequestCancelled
from gateway.errors import PayloadTooLarge, UnsupportedMediaType
from gateway.protocol import EXTENSION, Connection

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
JSON = (b"content-type", b"application/json")
RESPONSE_TIMEOUT_S = 30.0
"""How long an answer that is no stream may wait for its client."""


class BodyLimits(NamedTuple):
    """Of a request's body, and the settings that say so; without these nobody can change them."""

    max_bytes: int
    timeout_s: float
    bytes_setting: str | None = None
    timeout_setting: str | None = None

    @property
    def most(self) -> str:
        if self.bytes_setting is None:
            return f"the {self.max_bytes} bytes that are read here"
        return f"{self.bytes_setting} = {self.max_bytes}"

    @property
    def longest(self) -> str:
        seconds = f"{self.timeout_s:g}"
        return f"{seconds} s" if self.timeout_setting is None else f"{self.timeout_setting} = {seconds}"


@dataclass(slots=True, eq=False)
class Exchange:
    """``disconnected`` is set when the client is gone, ``writing_since_s`` while a write waits for it."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    connection: Connection | None
    arrived_s: float = field(default_factory=time.monotonic)
    has_started: bool = False
    last_written_s: float = field(default_factory=time.monotonic)
    writing_since_s: float | None = None
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: bytes) -> bytes:
        """``name`` in small letters; empty where the client did not send it."""
        return next((bytes(value) for key, value in self.scope["headers"] if key == name), b"")

    async def read_json(self, limits: BodyLimits) -> bytes:
        """The body. Raises PayloadTooLarge, UnsupportedMediaType, DeadlineExceeded, RequestCancelled."""
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        is_from_page = bool(self.header(b"origin"))
        if kind != b"application/json" and (kind or is_from_page):
            # A page in a browser may send forms, plain text and untyped bytes to any address, but not JSON.
            raise UnsupportedMediaType(
                f"content-type {kind.decode('latin-1')!r}: only application/json is read"
            )
        try:
            async with asyncio.timeout(limits.timeout_s):
                return await self._read_body(limits)
        except TimeoutError:
            raise DeadlineExceeded(f"the body was not complete within {limits.longest}") from None

    async def watch(self) -> None:
        """Returns when the client is gone. Nothing else may read from ``receive`` meanwhile."""
        while (await self.receive())["type"] != "http.disconnect":
            continue
        self.disconnected.set()

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        identity = (b"x-request-id", self.request_id.encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [identity, *headers]})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Waits for a client that reads too slowly; whoever holds open streams ends one that never does."""
        self.last_written_s = self.writing_since_s = time.monotonic()
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
        self.writing_since_s = None

    @property
    def can_write_now(self) -> bool:
        """Whether ``write_now`` may be used: the client keeps up, and no write that came before waits."""
        return self.connection is not None and self.writing_since_s is None and self.connection.is_writable

    def write_now(self, body: bytes) -> None:
        """A part of a started stream's body, straight to the connection."""
        assert self.connection is not None
        self.last_written_s = time.monotonic()
        self.connection.write(body)

    async def respond(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [JSON, length, *(headers or [])])
        await self.finish(body)

    async def finish(self, body: bytes) -> None:
        """The last part of the body; a client that does not take it in time is cut."""
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                await self.write(body, more=False)
        except TimeoutError:
            self.cut()

    def cut(self) -> None:
        """Ends the connection at once; what is buffered for a client that does not read is dropped."""
        if self.connection is not None:
            self.connection.abort()

    async def _read_body(self, limits: BodyLimits) -> bytes:
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limits.max_bytes:
            raise PayloadTooLarge(f"the body has {int(declared)} bytes, over {limits.most}")
        body = bytearray()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                raise RequestCancelled("the client left before its request was complete")
            body += message.get("body", b"")
            if len(body) > limits.max_bytes:
                raise PayloadTooLarge(f"the body is over {limits.most}")
            if not message.get("more_body", False):
                return bytes(body)


def new_exchange(scope: Scope, receive: Receive, send: Send) -> Exchange:
    connection = scope.get("extensions", {}).get(EXTENSION)
    return Exchange(scope, receive, send, _request_id(scope), connection)


def _request_id(scope: Scope) -> str:
    """The client's own if it is a plain word, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if REQUEST_ID.fullmatch(text):
                return str(text)
    return f"req-{secrets.token_hex(12)}"
