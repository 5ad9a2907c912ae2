"""Which blocks of one instance's KV pool belong to whom. Pure bookkeeping: no tensor is touched.

Every block is in exactly one place: free, held by an owner, or in quarantine. Blocks are handed out lowest
id first, so the pages in use stay dense and the attention kernel can take them as one view. A *pinned*
owner's blocks are the source of a transfer and cannot be released; *quarantined* blocks may still be
written by a transfer that was given up on, and are not reused until it is known to have drained
(``common.transfer``: a transfer that failed may still land).
"""

import heapq
from dataclasses import dataclass, field

from common.ids import RequestId


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """One attempt of one request in one room; both rooms of a mixed instance share the pool."""

    room: str
    request_id: RequestId
    attempt: int


@dataclass(slots=True)
class BlockAllocator:
    """The blocks of one pool. Raises KeyError for an unknown owner, ValueError for an illegal move."""

    total_blocks: int
    _free: list[int] = field(init=False)
    _held: dict[BlockOwner, list[int]] = field(init=False, default_factory=dict)
    _pinned: set[BlockOwner] = field(init=False, default_factory=set)
    _quarantined: dict[BlockOwner, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.total_blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._quarantined.values())

    def block_table(self, owner: BlockOwner) -> list[int]:
        """The owner's blocks in sequence order. A live view: it grows with the owner."""
        return self._held[owner]

    def owners(self) -> list[BlockOwner]:
        """Everyone who holds blocks."""
        return list(self._held)

    def is_quarantined(self, owner: BlockOwner) -> bool:
        return owner in self._quarantined

    def try_allocate(self, owner: BlockOwner, blocks: int) -> bool:
        """Gives ``owner`` that many more blocks (at least one), all or none."""
        if owner in self._quarantined:
            raise ValueError(f"{owner} is in quarantine")
        if blocks < 1:
            raise ValueError(f"{blocks} blocks asked for")
        if blocks > len(self._free):
            return False
        table = self._held.setdefault(owner, [])
        table.extend(heapq.heappop(self._free) for _ in range(blocks))
        return True

    def release(self, owner: BlockOwner) -> None:
        """Frees the owner's blocks."""
        if owner in self._pinned:
            raise ValueError(f"{owner} is pinned: a transfer reads its blocks")
        self._return(self._held.pop(owner))

    def pin(self, owner: BlockOwner) -> None:
        if owner not in self._held:
            raise KeyError(owner)
        self._pinned.add(owner)

    def unpin(self, owner: BlockOwner) -> None:
        self._pinned.remove(owner)

    def quarantine(self, owner: BlockOwner) -> None:
        """The owner is gone, but a transfer may still write into its blocks."""
        if owner in self._pinned:
            raise ValueError(f"{owner} is pinned: unpin before quarantine")
        self._quarantined[owner] = self._held.pop(owner)

    def end_quarantine(self, owner: BlockOwner) -> None:
        """The transfer is known to have drained."""
        self._return(self._quarantined.pop(owner))

    def check(self) -> None:
        """Every block is in exactly one place, and only holders are pinned."""
        seen = list(self._free)
        for blocks in (*self._held.values(), *self._quarantined.values()):
            seen.extend(blocks)
        assert sorted(seen) == list(range(self.total_blocks)), "a block is lost or held twice"
        assert self._pinned <= self._held.keys(), "a pinned owner holds nothing"
        assert not self._held.keys() & self._quarantined.keys(), "an owner is held and in quarantine"

    def _return(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` positions."""
    return -(-tokens // block_size)
