"""Which engines of this machine compute now, so that each uses the cores that the others leave.

A torch thread more than there are free cores costs whole scheduler slices at every barrier; a core left idle
while one engine computes alone costs half its speed. Each computing process holds a lock on a byte of one
file (its process id's): the kernel releases it with the process, however it ends.
"""

import fcntl
import os
import struct
import tempfile
from pathlib import Path
from typing import Literal

Computing = Literal["engine", "attention"]

LOCK_FORMAT = "hhqqi0q"
"""``struct flock``: type, whence, start, length, pid (0 for locks of an open file description)."""
ENGINES, ATTENTIONS = range(1 << 32), range(1 << 32, 1 << 33)
"""The bytes that each kind locks."""


class HostCores:
    """One process's share of ``cores``. Opens the file; ``close`` gives the claim and the file back."""

    def __init__(self, cores: int, path: Path, computing: Computing = "engine") -> None:
        self.cores = cores
        self._computing = computing
        self._offset = os.getpid() + (ENGINES if computing == "engine" else ATTENTIONS).start
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def claim(self) -> None:
        """This process computes from now on."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, self._offset, 1)

    def release(self) -> None:
        """This process waits for work."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self._offset, 1)

    def share(self) -> int:
        """Cores for this process now: an equal part for each engine that computes, at least one; an attention
        worker's is its part of an engine's."""
        engines = self._others(ENGINES.start, ENGINES.stop)
        if self._computing == "engine":
            return max(1, self.cores // (1 + engines))
        attentions = 1 + self._others(ATTENTIONS.start, ATTENTIONS.stop)
        return max(1, self.cores // max(1, engines) // attentions)

    def close(self) -> None:
        os.close(self._file)

    def _others(self, start: int, end: int) -> int:
        """Locked bytes of other processes in [start, end)."""
        if start == end:
            return 0
        kind, held = self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, end - start)
        if kind == fcntl.F_UNLCK:
            return 0
        return 1 + self._others(start, held) + self._others(held + 1, end)

    def _lock(self, command: int, kind: int, start: int, length: int) -> tuple[int, int]:
        """The kernel's answer: a lock's type and start."""
        request = struct.pack(LOCK_FORMAT, kind, os.SEEK_SET, start, length, 0)
        answer = struct.unpack(LOCK_FORMAT, fcntl.fcntl(self._file, command, request))
        return answer[0], answer[2]


def open_host_cores(computing: Computing = "engine") -> HostCores:
    """Of this user's processes on this machine, over the cores this process may run on."""
    path = Path(tempfile.gettempdir()) / f"lamella-cores-{os.getuid()}"
    return HostCores(len(os.sched_getaffinity(0)), path, computing)
