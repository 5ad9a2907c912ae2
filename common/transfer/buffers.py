"""Memory that a transfer can read or write: shared buffers, and memory somebody else allocated.

A SharedBuffer is an anonymous file (memfd). A process of the same user on the same host maps it by opening
``/proc/<pid>/fd/<fd>``; nothing has a name, so nothing is left behind when either side is killed. Its size is
sealed: nobody who maps it can truncate it under the others (which would be a SIGBUS).
"""

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from common.transfer.interface import PeerUnreachable, RegionError, RegionInfo, SharedHandle, StalePeer

F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


@dataclass(frozen=True, slots=True)
class ForeignMemory:
    """Memory that somebody else allocated: a tensor's, say. ``owner`` is kept as long as it is registered.

    ``is_host``: False for device memory, which only an engine can reach and no memory copy may touch.
    """

    address: int
    nbytes: int
    owner: object
    is_host: bool = True


class SharedBuffer:
    """``nbytes`` of zeros that a process on this host can map. Views keep it mapped after ``close``."""

    def __init__(self, nbytes: int, name: str = "lamella") -> None:
        if nbytes <= 0:
            raise RegionError(f"shared buffer {name!r}: nbytes = {nbytes}, must be over 0")
        self.nbytes = nbytes
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
            self._mapping = mmap.mmap(self._fd, nbytes)
            self._handle = SharedHandle(self._fd, os.fstat(self._fd).st_ino)
        except OSError:
            os.close(self._fd)
            raise
        self._is_closed = False

    @property
    def memory(self) -> memoryview:
        """Writable bytes, for ``torch.frombuffer`` and the like; the view keeps the mapping."""
        return memoryview(self._mapping)

    @property
    def address(self) -> int:
        return _address_of(self._mapping)

    @property
    def handle(self) -> SharedHandle:
        """Raises RegionError when closed: the descriptor's number may be another file by now."""
        if self._is_closed:
            raise RegionError("the shared buffer is closed")
        return self._handle

    def close(self) -> None:
        """No new peer can map it. The memory goes with the last view of it."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A peer's region in this process, mapped as long as this object lives, even beyond the peer's death."""

    address: int
    nbytes: int
    mapping: mmap.mmap


def map_region(pid: int, region: RegionInfo) -> MappedRegion:
    """Maps a region of process ``pid``.

    Raises PeerUnreachable (not shared, not permitted, gone) or StalePeer (another file by now).
    """
    if region.shared is None:
        raise PeerUnreachable(f"region {region.name!r} of process {pid} is not shared memory")
    try:
        fd = os.open(f"/proc/{pid}/fd/{region.shared.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise PeerUnreachable(f"region {region.name!r} of process {pid} cannot be opened: {exc}") from exc
    try:
        found = os.fstat(fd)
        if found.st_ino != region.shared.inode or found.st_size != region.nbytes:
            raise StalePeer(f"region {region.name!r} of process {pid} is another file by now")
        mapping = mmap.mmap(fd, region.nbytes)
    except (OSError, ValueError) as exc:
        raise PeerUnreachable(f"region {region.name!r} of process {pid} cannot be mapped: {exc}") from exc
    finally:
        os.close(fd)
    return MappedRegion(_address_of(mapping), region.nbytes, mapping)


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def host_identity() -> str:
    """Equal in two processes exactly when they know each other's pid: same boot, same pid namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
