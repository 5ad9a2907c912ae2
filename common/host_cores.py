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

LOCK_FORMAT = "hhqqi0q"
"""``struct flock``: type, whence, start, length, pid (0 for locks of an open file description)."""
END = 1 << 40


class HostCores:
    """One process's share of ``cores``. Opens the file; ``close`` gives the claim and the file back."""

    def __init__(self, cores: int, path: Path) -> None:
        self.cores = cores
        self._offset = os.getpid()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def claim(self) -> None:
        """This process computes from now on."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, self._offset, 1)

    def release(self) -> None:
        """This process waits for work."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self._offset, 1)

    def share(self) -> int:
        """Cores for this process now: an equal part for each that computes, at least one."""
        return max(1, self.cores // (1 + self._others(0, END)))

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


def open_host_cores() -> HostCores:
    """Of this user's processes on this machine, over the cores this process may run on."""
    path = Path(tempfile.gettempdir()) / f"lamella-cores-{os.getuid()}"
    return HostCores(len(os.sched_getaffinity(0)), path)
