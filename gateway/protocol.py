"""uvicorn's protocol with what it lacks: bounds on headers and bodies, small send buffers, a way past ASGI.

Without the first two a client that sends half a request keeps its connection for ever, or fills the memory
with it, and one that never reads makes the server buffer megabytes of its stream before anybody notices. The
last, ``Connection``, lets a token go from the bus's callback to the socket without waking a task.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.errors import InvalidRequest
from gateway.errors import error_body

SEND_BUFFER_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10
"""Of a request's path, names and values, in whatever pieces they come."""
TOO_LONG = f"The header is over {MAX_HEADER_BYTES} bytes."
EXTENSION = "lamella.connection"
"""Where in a request's ASGI scope its ``Connection`` is, under ``extensions``."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The socket under a response whose headers are out and whose body is chunked."""

    transport: asyncio.Transport
    flow: FlowControl

    @property
    def is_writable(self) -> bool:
        """Whether the client keeps up: bytes may be written without waiting."""
        return not self.flow.write_paused and not self.transport.is_closing()

    def write(self, chunk: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def abort(self) -> None:
        """Drops the connection with whatever it still buffers; its request hears of a disconnect."""
        self.transport.abort()


def guarded_protocol(header_timeout_s: float, body_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class with these deadlines, for ``common.service.run_service``."""

    class GuardedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _body_deadline: asyncio.TimerHandle | None = None
        _earlier: tuple[RequestResponseCycle, ...] = ()
        _received_bytes = 0
        _header_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connection = transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
            self._start_deadline()

        def data_received(self, data: bytes) -> None:
            deadline = self._deadline
            super().data_received(data)
            self._bound_silence()
            if deadline is None or deadline is not self._deadline or self.transport.is_closing():
                return
            # The header that was being read before is still being read.
            self._received_bytes += len(data)
            if self._received_bytes > MAX_HEADER_BYTES:
                self.send_400_response(TOO_LONG)

        def send_400_response(self, msg: str) -> None:
            """As every other error of the gateway: its object as JSON. A header that was refused may be why
            the parser stopped."""
            body = error_body(InvalidRequest(TOO_LONG if self._header_bytes > MAX_HEADER_BYTES else msg))
            head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()

        def on_message_begin(self) -> None:
            self._start_deadline()
            super().on_message_begin()
            extensions: dict[str, Any] = {EXTENSION: Connection(self.transport, self.flow)}
            self.scope["extensions"] = extensions

        def on_url(self, url: bytes) -> None:
            self._count_header(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count_header(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._stop_deadline()
            self._stop_body_deadline()
            loop = asyncio.get_running_loop()
            self._body_deadline = loop.call_later(body_timeout_s, self._give_body_up)
            # uvicorn tells only a connection's last request that the client left; those before it are ours.
            cycles = (*self._earlier, self.cycle)
            self._earlier = tuple(each for each in cycles if each and not each.response_complete)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._stop_body_deadline()
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_deadline()
            self._stop_body_deadline()
            for cycle in self._earlier:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            super().connection_lost(exc)

        def _count_header(self, size: int) -> None:
            """Raises InvalidRequest, upon which the parser stops and the request is refused."""
            self._header_bytes += size
            if self._header_bytes > MAX_HEADER_BYTES:
                raise InvalidRequest(TOO_LONG)

        def _start_deadline(self) -> None:
            self._stop_deadline()
            self._received_bytes = self._header_bytes = 0
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(header_timeout_s, self.transport.close)

        def _stop_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _stop_body_deadline(self) -> None:
            if self._body_deadline is not None:
                self._body_deadline.cancel()
                self._body_deadline = None

        def _give_body_up(self) -> None:
            """The connection ends with the answer: what else of the body comes is nobody's."""
            if self.cycle.response_complete:
                self.transport.close()
            else:
                self.cycle.keep_alive = False

        def _bound_silence(self) -> None:
            """Bytes that begin no request, or end the body of one that was answered, have stopped uvicorn's
            clock for idle connections for good."""
            is_idle = self.cycle is None or self.cycle.response_complete
            is_timed = self._deadline or self._body_deadline or self.timeout_keep_alive_task
            if is_idle and is_timed is None and not self.transport.is_closing():
                self._start_deadline()

    return GuardedProtocol
