"""uvicorn's protocol with what it lacks against slow clients: a deadline for headers, small send buffers.

Without them a client that sends half a header keeps its connection for ever, and one that never reads makes
the server buffer megabytes of its stream before anybody notices.
"""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SEND_BUFFER_BYTES = 64 << 10


def guarded_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class with that deadline, for ``common.service.run_service``."""

    class GuardedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connection = transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
            self._start_deadline()

        def on_message_begin(self) -> None:
            self._start_deadline()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_deadline()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_deadline()
            super().connection_lost(exc)

        def _start_deadline(self) -> None:
            self._stop_deadline()
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(header_timeout_s, self.transport.close)

        def _stop_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return GuardedProtocol
