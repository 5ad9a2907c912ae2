"""How the command line talks to a running supervisor: one JSON line each way over a Unix socket.

The socket lies in a directory only its user can enter, so whoever can connect may command.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from common.errors import LamellaError, LauncherError, reason_of
from common.messages import Role
from common.scaling import DesiredCounts, ScaledRole
from gateway.service_levels import ServiceLevel
from services.launcher.wishes import CountWish, LastOfPhase, RoleChange

MAX_LINE_BYTES = 1 << 20

MeshState = Literal["starting", "ready", "stopping"]


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """Answered by a MeshStatus."""


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """Makes the roles named as many as said; answered by a MeshStatus with ``changes`` when that is so.
    ``is_forced``: also where nobody is left that prefills, or that decodes."""

    wishes: dict[ScaledRole, CountWish]
    is_forced: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Lets that process finish what it has and end, and starts no other for it; answered when it is so.
    ``is_forced``: as in Scale."""

    service_id: str
    is_forced: bool = False


class InstanceStatus(msgspec.Struct, frozen=True):
    """``state``: starting, ready, unregistered (it was ready, and its lease ran out or the store is away),
    restarting, stopping or stopped. Instances of other machines are always ready. ``home``: the role that
    it goes back to."""

    id: str
    role: Role
    state: str
    home: Role | None = None


class ProcessStatus(msgspec.Struct, frozen=True):
    """``pid`` is None while a process that died waits to be started again. ``state``: as an instance's; a
    server, which registers nowhere, is running or not. ``url``: of a service that is registered, and
    ``private_url`` of a gateway that is."""

    id: str
    role: str
    pid: int | None
    state: str
    restarts: int = 0
    url: str | None = None
    private_url: str | None = None


class LeaderStatus(msgspec.Struct, frozen=True):
    """The scheduler that does what only one may."""

    id: str
    epoch: int


class MeshStatus(msgspec.Struct, frozen=True, tag="mesh"):
    """A local mesh as its supervisor sees it. ``url`` is None until the gateway is known, and so is
    ``private_url``, where operators look; ``admin_key_file`` has the key to change it by. ``service_levels``:
    of the last minute, which the command line asks the gateways for. ``leader`` is None between two of them,
    and where the store is away. ``plan``: its latest for the number of workers, where it makes any.
    ``changes``: what the command that this answers has changed."""

    state: MeshState
    url: str | None
    instances: list[InstanceStatus]
    processes: list[ProcessStatus]
    service_levels: list[ServiceLevel] = []
    leader: LeaderStatus | None = None
    plan: DesiredCounts | None = None
    changes: list[RoleChange] = []
    private_url: str | None = None
    admin_key_file: str | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command failed; ``message`` says why. ``can_be_forced``: nothing but its ``is_forced`` lacked."""

    message: str
    can_be_forced: bool = False


Command = AskStatus | Scale | Drain
Answer = MeshStatus | Refused
Carry = Callable[[Command], Awaitable[MeshStatus]]


@contextlib.asynccontextmanager
async def control_server(path: Path, carry_out: Carry) -> AsyncIterator[None]:
    """Answers commands at ``path`` as long as the context lasts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            writer.write(msgspec.json.encode(await _answer(line, carry_out)) + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError):
            # The command line went away, or sent a line beyond the limit: it is told by the closed socket.
            pass
        finally:
            writer.close()

    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, str(path), limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _answer(line: bytes, carry_out: Carry) -> Answer:
    try:
        command = msgspec.json.decode(line, type=Command)
        return await carry_out(command)
    except msgspec.DecodeError as exc:
        return Refused(f"not a command: {exc}")
    except LamellaError as exc:
        return Refused(str(exc), can_be_forced=isinstance(exc, LastOfPhase))


def listening_pid(path: Path) -> int | None:
    """Of the supervisor that answers at ``path``, from the kernel; None where nobody does."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return None
        format_ = "3i"  # pid, uid, gid
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(format_))
    return int(struct.unpack(format_, peer)[0])


def ask(path: Path, command: Command, timeout_s: float) -> MeshStatus:
    """``send`` for who has no loop."""
    return asyncio.run(send(path, command, timeout_s))


async def send(path: Path, command: Command, timeout_s: float) -> MeshStatus:
    """The supervisor's answer. Raises LauncherError when it refuses, is gone or takes longer; LastOfPhase
    where it would not refuse by force."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
            try:
                writer.write(msgspec.json.encode(command) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError as exc:
        raise LauncherError(f"the mesh's supervisor did not answer within {timeout_s} s") from exc
    except OSError as exc:
        raise LauncherError(f"the mesh's supervisor cannot be reached ({reason_of(exc)})") from exc
    if not line:
        raise LauncherError("the mesh's supervisor ended before it answered")
    answer: Answer = msgspec.json.decode(line, type=Answer)
    if isinstance(answer, Refused):
        raise (LastOfPhase if answer.can_be_forced else LauncherError)(answer.message)
    return answer
