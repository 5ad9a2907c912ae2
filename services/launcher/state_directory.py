"""What a local mesh keeps on disk, and which processes are its own.

::

    lamella-state    says that `up` made the directory
    lock             held (flock) by the supervisor as long as it lives
    mesh.toml        the configuration of every service (0600: it holds the servers' passwords)
    admin-key        what the gateway's private port wants to see before it changes anything (0600)
    plan.json        how many of each role, and which servers were given
    processes.json   every process with its start time, so that a reused pid is never signalled
    control.sock     where the supervisor answers (or a short path in the temporary directory)
    nats.conf redis.conf logs/

The directory is private (0700). Everything but ``logs/`` is removed when the mesh goes down.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import select
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from common.errors import LauncherError, reason_of

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 108 with the final zero."""

DEFAULT_STATE_DIRECTORY = Path(".lamella")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One life of a process. ``start_ticks`` is the kernel's start time, field 22 of /proc/PID/stat."""

    service_id: str
    role: str
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_ticks: int


@dataclass(frozen=True, slots=True)
class StateDirectory:
    """The paths below one directory."""

    path: Path

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def config_file(self) -> Path:
        return self.path / "mesh.toml"

    @property
    def admin_key_file(self) -> Path:
        return self.path / "admin-key"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def processes_file(self) -> Path:
        return self.path / "processes.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @property
    def control_socket(self) -> Path:
        """Beside the rest, or where the path is too long for a socket under the temporary directory."""
        beside = self.path / "control.sock"
        if len(os.fsencode(beside)) <= MAX_SOCKET_PATH_BYTES:
            return beside
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"lamella-{os.getuid()}-{name}" / "control.sock"

    @property
    def marker(self) -> Path:
        """Says that the directory was made by ``up``: nothing is changed or removed in any other."""
        return self.path / "lamella-state"

    def create(self) -> None:
        """Raises LauncherError when the directory cannot be made, is not private or holds something else."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private_directory(self.path)
            if not self.marker.exists() and any(self.path.iterdir()):
                raise LauncherError(
                    f"{self.path} holds files and is no state directory: choose another --state-dir"
                )
            self.marker.touch(mode=0o600)
            self.logs.mkdir(exist_ok=True)
        except OSError as exc:
            raise LauncherError(f"state directory {self.path}: {reason_of(exc)}") from exc

    def make_socket_directory(self) -> None:
        """After ``remove_files``, which takes it away where it is another one. Raises LauncherError."""
        directory = self.control_socket.parent
        try:
            make_private_directory(directory)
        except OSError as exc:
            raise LauncherError(f"control socket in {directory}: {reason_of(exc)}") from exc

    def remove_files(self) -> None:
        """Removes what ``up`` made, except the logs and the lock. Nothing where ``up`` never was."""
        if not self.marker.exists():
            return
        names = (
            self.config_file,
            self.admin_key_file,
            self.plan_file,
            self.processes_file,
            self.control_socket,
        )
        for file in (*names, self.path / "nats.conf", self.path / "redis.conf"):
            file.unlink(missing_ok=True)
        if self.control_socket.parent != self.path:
            with contextlib.suppress(OSError):
                self.control_socket.parent.rmdir()

    def read_processes(self) -> list[ProcessIdentity]:
        """What ran when it was last written; empty when nothing did or the file is damaged."""
        try:
            return msgspec.json.decode(self.processes_file.read_bytes(), type=list[ProcessIdentity])
        except (OSError, msgspec.DecodeError):
            return []

    def write_processes(self, processes: list[ProcessIdentity]) -> None:
        """Raises LauncherError."""
        write_private(self.processes_file, msgspec.json.format(msgspec.json.encode(processes)))


def make_private_directory(path: Path) -> None:
    """Raises PermissionError for a directory that others can write: it may be a trap in a shared place."""
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(1, f"{path} is not private to this user")


def write_private(path: Path, data: bytes) -> None:
    """Replaces the file as a whole; readable by its owner only. Raises LauncherError, for example on a full
    disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        unfinished.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise LauncherError(f"{path} cannot be written: {exc.strerror}") from exc


@contextlib.contextmanager
def locked(state: StateDirectory) -> Iterator[None]:
    """Holds the directory for one supervisor. Raises LauncherError when another one has it, OSError."""
    with state.lock_file.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise already_runs(state) from None
        yield


def already_runs(state: StateDirectory) -> LauncherError:
    """The refusal of a directory that another supervisor has."""
    return LauncherError(
        f"a mesh already runs in {state.path}: `lamella down` ends it, another --state-dir keeps both"
    )


def is_locked(state: StateDirectory) -> bool:
    """Whether a supervisor lives. Changes nothing where none ever did."""
    if not state.marker.exists():
        return False
    try:
        with locked(state):
            return False
    except LauncherError:
        return True
    except OSError:
        return False


def identify(service_id: str, role: str, pid: int) -> ProcessIdentity | None:
    """The process as it is now; None when it is gone."""
    start_ticks = _start_ticks(pid)
    return None if start_ticks is None else ProcessIdentity(service_id, role, pid, start_ticks)


def is_alive(process: ProcessIdentity) -> bool:
    """Whether this very process still runs."""
    return _start_ticks(process.pid) == process.start_ticks


def end_process(process: ProcessIdentity, grace_s: float) -> None:
    """Ends a process that is not our child: asked first, killed after ``grace_s``.

    A handle on the process is taken before its identity is checked, so a pid that is reused meanwhile is
    not hit. Raises LauncherError when even SIGKILL does not end it.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as exc:
        # The latter two: of a thread, so that it is not the process that was written down.
        if exc.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            raise
        return
    try:
        if not is_alive(process):
            return
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            # Not select(): it refuses descriptors from 1,024 on.
            ending = select.poll()
            ending.register(handle, select.POLLIN)
            if ending.poll(1000 * wait_s):
                return
        raise LauncherError(f"process {process.pid} ({process.service_id}) does not end")
    finally:
        os.close(handle)


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    # Field 3 is the state; a zombie has ended and only waits to be noticed by its parent.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
