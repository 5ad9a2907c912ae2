"""``lamella top`` in a terminal and outside of one, before a recorded gateway."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from common.errors import LauncherError
from common.ids import Incarnation
from common.messages import ServiceKind, ServiceRecord
from services.top.command import private_url_of
from tests.e2e.meshes import LAMELLA, environment, lamella
from tests.ui.recorded_gateway import running_recorded_gateway
from tests.ui.recorded_mesh import instance, mesh, small_mesh

ROWS, COLUMNS = 50, 160
LEAVES_SCREEN = b"\x1b[?1049l"
"""What a terminal is told so that it shows again what it showed before."""


@contextmanager
def top_in_a_terminal(url: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The process, and where what it writes can be read."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [*LAMELLA, "top", "--url", url]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**environment(), "TERM": "xterm-256color"}
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read_until(terminal: int, words: bytes) -> None:
    seen = b""
    while words not in seen:
        try:
            seen += os.read(terminal, 65_536)
        except OSError:
            raise AssertionError(f"it ended without {words!r}: {seen[-2000:]!r}") from None


def test_a_terminal_shows_what_changes_says_when_it_is_old_and_is_left_as_it_was() -> None:
    with (
        running_recorded_gateway(small_mesh()) as gateway,
        top_in_a_terminal(gateway.url) as (process, terminal),
    ):
        read_until(terminal, b"decode-1")
        gateway.show(mesh=mesh([instance("decode-7", "decode")], {}, [], None))
        read_until(terminal, b"decode-7")
        process.send_signal(signal.SIGINT)
        read_until(terminal, LEAVES_SCREEN)
        assert process.wait(10) == 0


def test_a_gateway_that_goes_leaves_what_was_known_last() -> None:
    with ExitStack() as gone:
        gateway = gone.enter_context(running_recorded_gateway(small_mesh()))
        with top_in_a_terminal(gateway.url) as (process, terminal):
            read_until(terminal, b"decode-1")
            gone.close()
            read_until(terminal, b"what is shown is old")
            read_until(terminal, b"decode-1")
            process.send_signal(signal.SIGTERM)
            read_until(terminal, LEAVES_SCREEN)


def test_without_a_terminal_it_is_shown_once() -> None:
    with running_recorded_gateway(small_mesh()) as gateway:
        assert "decode-1" in lamella("top", "--url", gateway.url)


def test_an_address_that_is_no_private_port_is_said_to_be_none() -> None:
    with running_recorded_gateway(small_mesh()) as gateway:
        done = subprocess.run(
            [*LAMELLA, "top", "--url", f"{gateway.url}/ui"],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def service(kind: ServiceKind, private_url: str | None = None) -> ServiceRecord:
    return ServiceRecord(
        service_id=f"{kind}-0",
        incarnation=Incarnation("i1"),
        kind=kind,
        host="here",
        pid=7,
        http_url="http://here:1",
        private_url=private_url,
    )


def test_a_gateway_that_names_no_private_port_is_told_from_none() -> None:
    assert private_url_of([service("scheduler"), service("gateway", "http://here:2")]) == "http://here:2"
    with pytest.raises(LauncherError, match="no gateway is registered"):
        private_url_of([service("scheduler")])
    with pytest.raises(LauncherError, match="gateway-0: registered without a private port"):
        private_url_of([service("scheduler"), service("gateway")])
