"""Commands that ask a service over HTTP, before somebody who is none."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.ids import Incarnation
from common.listening import bind, port_of
from common.messages import ServiceRecord
from services.asking import NoAnswer, ask_service
from services.healthcheck import is_healthy
from services.service_levels import levels_of


@contextmanager
def greeting_port() -> Iterator[str]:
    """A port that speaks before it is asked and in no HTTP, as NATS' does."""

    def greet() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b'INFO {"server_name": "nobody"}\r\n')
                connection.recv(4096)

    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port_of(listener)}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def test_a_port_that_speaks_no_http_gives_no_answer() -> None:
    with greeting_port() as url:
        with pytest.raises(NoAnswer, match="does not answer"):
            ask_service(f"{url}/api/mesh", dict[str, str])
        assert not is_healthy(url, "ready")
        gateway = ServiceRecord(
            service_id="gateway-0",
            incarnation=Incarnation("i1"),
            kind="gateway",
            host="here",
            pid=7,
            http_url=url,
        )
        assert levels_of(gateway) == []
