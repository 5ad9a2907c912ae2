"""HTTP/1.1 for a load generator: one connection, one exchange at a time, times taken where the bytes arrive.

The clock is read once per readable socket, in ``data_received``: a client that first wakes a task counts
its own scheduling into the server's latency, which with hundreds of streams on one core is milliseconds.
Bodies go straight from httptools' parser to the sink; nothing is queued, so nothing can grow.
"""

import asyncio
import ssl
import time
from typing import Protocol, cast

import httptools

from common.errors import ServiceError
from services.server_url import Target


class ConnectionFailed(ServiceError):
    """No connection, or it broke in mid-exchange. ``is_unanswered``: before the response's first byte."""

    def __init__(self, message: str, *, is_unanswered: bool) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


class ResponseSink(Protocol):
    """Takes a response as it arrives; the times are of the socket's readiness, in seconds."""

    def take_head(self, status: int, headers: dict[str, str]) -> None: ...

    def take_body(self, data: bytes, now_s: float) -> None: ...


def encode_request(target: Target, method: str, path: str, body: bytes, api_key: str | None) -> bytes:
    """A whole request, head and body."""
    authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"{method} {target.path}{path} HTTP/1.1\r\nHost: {target.authority}\r\n"
        f"User-Agent: lamella-bench\r\nAccept: application/json, text/event-stream\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body


class HttpConnection(asyncio.Protocol):
    """One connection. Invariant: at most one exchange is open, and it always ends."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: ResponseSink | None = None
        self._answered: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._arrived_s = 0.0
        self._has_answer_begun = False
        self.is_reusable = True

    async def exchange(self, request: bytes, sink: ResponseSink) -> None:
        """Send ``request`` and feed ``sink`` until the response is over. ConnectionFailed where it breaks.

        A caller that is cancelled leaves the connection closed: the server sees a client that went away.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionFailed("the connection is closed", is_unanswered=True)
        self._sink = sink
        self._headers = {}
        self._has_answer_begun = False
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._answered
        except BaseException:
            self.close()
            raise
        finally:
            self._sink = None
            self._answered = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived_s = time.monotonic()
        if self._parser is None or self._sink is None:
            # Bytes between exchanges belong to nobody: the next response would be misread.
            self.close()
            return
        self._has_answer_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._break(f"not an HTTP/1.1 response: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._transport = None
        if self._is_close_the_end():
            self._end()
            return
        self._break(f"the connection broke: {exc}" if exc else "the server closed the connection")

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser is not None and self._sink is not None:
            self._sink.take_head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.take_body(body, self._arrived_s)

    def on_message_complete(self) -> None:
        if self._parser is not None and not self._parser.should_keep_alive():
            self.is_reusable = False
        self._end()

    def _is_close_the_end(self) -> bool:
        """A response with neither length nor chunks ends where the connection does."""
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        return self._has_answer_begun and bool(self._headers) and not framed

    def _end(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _break(self, message: str) -> None:
        self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionFailed(message, is_unanswered=not self._has_answer_begun))


class ConnectionPool:
    """Keep-alive connections to one server, as many as the caller has exchanges at once."""

    def __init__(self, target: Target, connect_timeout_s: float) -> None:
        self.target = target
        self._connect_timeout_s = connect_timeout_s
        self._tls = ssl.create_default_context() if target.is_tls else None
        self._idle: list[HttpConnection] = []

    async def exchange(self, request: bytes, sink: ResponseSink) -> None:
        """One exchange, on an idle connection where there is one.

        A kept connection may have been closed by the server meanwhile: where it breaks before any byte of an
        answer, the request goes once more over a new one.
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                await connection.exchange(request, sink)
            except ConnectionFailed as exc:
                if not exc.is_unanswered:
                    raise
            else:
                self._give_back(connection)
                return
        connection = await self._connect()
        await connection.exchange(request, sink)
        self._give_back(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    def _give_back(self, connection: HttpConnection) -> None:
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    HttpConnection, self.target.host, self.target.port, ssl=self._tls
                )
        except TimeoutError as exc:
            raise ConnectionFailed(
                f"no connection to {self.target.authority} within {self._connect_timeout_s} s",
                is_unanswered=True,
            ) from exc
        except OSError as exc:
            raise ConnectionFailed(
                f"no connection to {self.target.authority}: {exc}", is_unanswered=True
            ) from exc
        return connection
