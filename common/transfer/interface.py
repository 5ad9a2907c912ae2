"""What the rooms see of a transfer: addresses that travel, runs of bytes, a link, and what can go wrong.

Errors, all under ``common.errors.TransferError``::

    TransferError
    ├── EngineStartError    Mooncake cannot be imported or started, or is used in a forked process
    ├── RegionError         a name, range or kind of memory that does not exist or may not be touched
    │   └── RegionOverlap   the memory is registered already
    ├── PeerUnreachable     nobody answers there, no path leads there, or the link just died
    ├── PeerTimeout         first contact took longer than its deadline
    ├── StalePeer           another process answers there than the one that was announced
    ├── LinkBusy            the link's queue of transfers is full
    ├── TransferFailed      all slices are terminal and at least one did not arrive
    └── TransferStalled     the deadline passed with slices still in the air

The last two name the runs whose destination is *suspect*: bytes of a failed or stalled transfer may still
land (a stopped peer that resumes reads what its socket holds). The receiver keeps those blocks in quarantine
until the sender has settled and the grace of ``SOCKET_GRACE_S`` is over.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from common.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from common.transfer.transfer import Transfer

SOCKET_GRACE_S = 2.0
"""How long bytes may sit in socket buffers after the sender has given up on them."""
MAX_SUBMIT_WINDOW = 1000
"""Outstanding slices per link; Mooncake wedges the peer at about twice as many."""


class SharedHandle(msgspec.Struct, frozen=True):
    """Where a process of the same user on the same host finds a memfd: ``/proc/<pid>/fd/<fd>``.

    ``inode`` tells whether that descriptor is still the announced one.
    """

    fd: int
    inode: int


class RegionInfo(msgspec.Struct, frozen=True):
    """Registered memory of a peer: ``[base, base + nbytes)`` in the peer's address space."""

    name: str
    base: int
    nbytes: int
    shared: SharedHandle | None = None


class PeerInfo(msgspec.Struct, frozen=True):
    """One life of one process as a transfer destination. Travels over the control plane.

    ``address`` is ``ipv4:port`` of its Mooncake engine, None where the process has none. ``host`` is equal
    for two processes exactly when they can see each other's ``pid``.
    """

    address: str | None
    incarnation: str
    host: str
    pid: int
    regions: tuple[RegionInfo, ...]

    def region(self, name: str) -> RegionInfo:
        """The region called ``name``. Raises RegionError."""
        for region in self.regions:
            if region.name == name:
                return region
        known = ", ".join(region.name for region in self.regions)
        raise RegionError(f"region {name!r}: peer {self.incarnation[:8]} has only {known}")


class Run(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """``nbytes`` contiguous bytes from a registered region here to a region of the peer."""

    local_region: str
    local_offset: int
    remote_region: str
    remote_offset: int
    nbytes: int


class TransferStatistics(msgspec.Struct, frozen=True):
    """What one transfer took, from ``write`` until its last slice was acknowledged.

    ``slices`` counts what was really sent: adjacent runs are joined, long ones split.
    """

    nbytes: int
    seconds: float
    slices: int


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that hold for every link of an endpoint.

    ``progress_timeout_s`` is after how long without progress Mooncake gives a slice up; it reads that once
    per process. A stopped peer costs that time and a second per *row* of slices, one on each of its 16
    connections: ``submit_window`` / 16 rows, so 48 s with these defaults until all is settled. A wider
    window is no faster; 2,000 slices wedge a peer.
    """

    open_timeout_s: float = 5.0
    progress_timeout_s: int = 5
    drain_timeout_s: float = 5.0
    submit_window: int = 128
    max_slice_bytes: int = 4 << 20
    max_queued_transfers: int = 1024

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if getattr(self, key) <= 0:
                raise ConfigError(f"limits.{key}", getattr(self, key), "must be over 0")
        if self.submit_window > MAX_SUBMIT_WINDOW:
            raise ConfigError("limits.submit_window", self.submit_window, f"must be <= {MAX_SUBMIT_WINDOW}")


class Link(Protocol):
    """A way to write into one incarnation of one peer. Dies once, is never revived."""

    @property
    def kind(self) -> str:
        """``mooncake`` or ``shared_memory``, with ``emulated `` in front on a slowed-down link."""
        ...

    @property
    def peer(self) -> PeerInfo: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def is_idle(self) -> bool:
        """Nothing is queued or in the air."""
        ...

    def write(self, runs: Sequence[Run]) -> "Transfer":
        """Starts to write ``runs``; order among them is not kept. Await the answer for the outcome.

        The source bytes must not change until the transfer has settled. Raises RegionError (nothing was
        sent), PeerUnreachable (the link is dead) or LinkBusy at once.
        """
        ...

    def die(self, reason: str) -> None:
        """The peer is known to be gone: what is queued fails now, what is sent when it is terminal."""
        ...

    async def close(self) -> None:
        """Takes no more writes and waits a bounded time for those under way."""
        ...

    def forfeit(self) -> None:
        """After ``close`` and after the engine has gone: fails what was still out."""
        ...


class EngineStartError(TransferError):
    """Mooncake cannot be used in this process; the text says why and what would help."""


class RegionError(TransferError):
    """Memory that does not exist, is out of range, or cannot be reached that way."""


class RegionOverlap(RegionError):
    """The memory is registered already, wholly or in part."""


class PeerUnreachable(TransferError):
    """No path, no answer, or a link that has died."""


class PeerTimeout(TransferError):
    """First contact exceeded its deadline."""


class StalePeer(TransferError):
    """The process that answers is not the incarnation that was announced."""


class LinkBusy(TransferError):
    """Too many transfers wait on one link."""


class TransferFailed(TransferError):
    """Every slice is terminal, some did not arrive: what ``suspect_runs`` point at is unknown content."""

    def __init__(self, message: str, suspect_runs: Sequence[Run] = ()) -> None:
        super().__init__(message)
        self.suspect_runs = tuple(suspect_runs)


class TransferStalled(TransferError):
    """The deadline passed; ``suspect_runs`` are still being written. Wait for the transfer to settle."""

    def __init__(self, message: str, suspect_runs: Sequence[Run] = ()) -> None:
        super().__init__(message)
        self.suspect_runs = tuple(suspect_runs)


LINK_ERRORS = (PeerUnreachable, PeerTimeout, TransferFailed, TransferStalled)
"""Which say something of the link; the others of memory, of another life, or of how much is under way."""


def encode_peer_info(peer: PeerInfo) -> bytes:
    return msgspec.msgpack.encode(peer)


def decode_peer_info(data: bytes) -> PeerInfo:
    """Raises StalePeer for bytes that are no peer's address (another version's, most likely)."""
    try:
        return msgspec.msgpack.decode(data, type=PeerInfo)
    except msgspec.MsgspecError as exc:
        raise StalePeer(f"not a transfer address: {exc}") from exc
