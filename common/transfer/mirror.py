"""Writing into a peer's region from one thread, without an event loop: what attention's exchange needs.

A mirror is the peer's region as this process sees it. What is written into ``memory`` and published appears
there, each publication whole and its bytes in order. Through shared memory the mirror *is* the region;
through Mooncake it is a registered copy, of which published ranges are sent.
"""

import time
from collections import deque

from common.transfer.buffers import MappedRegion, SharedBuffer
from common.transfer.interface import PeerUnreachable, TransferFailed
from common.transfer.mooncake import MooncakeEngine

MAX_OUTSTANDING = 64
POLL_S = 0.001


class MappedMirror:
    """The region itself, mapped."""

    kind = "shared_memory"
    is_mapped = True

    def __init__(self, mapped: MappedRegion) -> None:
        self.memory = memoryview(mapped.mapping)

    def publish(self, offset: int, nbytes: int) -> None:
        """Stores are visible in order already."""

    def wait_settled(self, timeout_s: float) -> bool:
        return True


class MooncakeMirror:
    """One one-sided write a publication; never waits for its acknowledgement, only looks for failed ones.

    ``remote_base`` is the region's address in the peer. ``publish`` belongs to one thread.
    """

    kind = "mooncake"
    is_mapped = False

    def __init__(
        self, engine: MooncakeEngine, spelling: str, remote_base: int, buffer: SharedBuffer, peer_name: str
    ) -> None:
        self.memory = buffer.memory
        self.buffer = buffer
        self._engine = engine
        self._spelling = spelling
        self._base = buffer.address
        self._remote_base = remote_base
        self._peer_name = peer_name
        self._outstanding: deque[int] = deque()

    def publish(self, offset: int, nbytes: int) -> None:
        """Raises PeerUnreachable where the write is not taken, TransferFailed where an earlier one failed."""
        self._reap()
        while len(self._outstanding) >= MAX_OUTSTANDING:
            time.sleep(POLL_S)
            self._reap()
        source, destination = self._base + offset, self._remote_base + offset
        slice_id = self._engine.submit_write(self._spelling, source, destination, nbytes)
        if slice_id is None:
            raise PeerUnreachable(f"peer {self._peer_name} takes no more writes")
        self._outstanding.append(slice_id)

    def _reap(self) -> None:
        while self._outstanding:
            has_arrived = self._engine.poll(self._outstanding[0])
            if has_arrived is None:
                return
            self._outstanding.popleft()
            if not has_arrived:
                raise TransferFailed(f"a write to peer {self._peer_name} failed")

    def wait_settled(self, timeout_s: float) -> bool:
        """Whether no write is in the air, so that the memory may be given up or written anew. Blocks."""
        deadline_s = time.monotonic() + timeout_s
        while self._outstanding and time.monotonic() < deadline_s:
            if self._engine.poll(self._outstanding[0]) is None:
                time.sleep(POLL_S)
            else:
                self._outstanding.popleft()
        return not self._outstanding
