"""Which blocks of an instance's KV pools belong to whom. Pure bookkeeping: no tensor is touched.

An instance has one pool of its own, or pools on attention workers, which come and go. A block's id says which
pool it is of; all blocks of an owner are of one pool. Every block is in exactly one place: free, held by an
owner, or in quarantine. Blocks are handed out lowest id first, so the pages in use stay dense and the
attention kernel can take them as one view; where there are no pages, those that were freed last. A *pinned*
owner's blocks are the source of a transfer and cannot be released; *quarantined* blocks may still be written
by a transfer that was given up on, and are not reused until it is known to have drained
(``common.transfer``: a transfer that failed may still land).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.ids import RequestId

POOL_STRIDE = 1 << 32
"""Between the first ids of two pools; pool 0's ids are block numbers."""


def pool_of(block: int) -> int:
    return block // POOL_STRIDE


def in_pool(blocks: Sequence[int]) -> tuple[int, ...]:
    """The block numbers within their pool."""
    return tuple(block % POOL_STRIDE for block in blocks)


class BlockOwner(NamedTuple):
    """One attempt of one request in one room; both rooms of a mixed instance share the pool. A tuple, as it
    is the key of nearly everything that a room keeps."""

    room: str
    request_id: RequestId
    attempt: int


@dataclass(slots=True)
class _Pool:
    """``is_open``: new owners may come. ``is_lost``: its memory is gone, and returned blocks with it."""

    total_blocks: int
    free: list[int]
    is_open: bool = True
    is_lost: bool = False


@dataclass(slots=True)
class BlockAllocator:
    """The blocks of all pools, at first of pool 0 with ``total_blocks`` (none: it does not exist).

    ``free_blocks`` are those of open pools, ``total_blocks`` of those that are not lost, and
    ``largest_pool_blocks`` bounds the longest sequence that could ever be held: 0 without an open pool.
    ``is_any_lost``: whether ``is_lost`` is true of anybody. ``has_pages``: it matters which blocks are used.

    Raises KeyError for an unknown owner or pool, ValueError for an illegal move.
    """

    first_pool_blocks: int
    has_pages: bool = True
    free_blocks: int = field(init=False, default=0)
    total_blocks: int = field(init=False, default=0)
    largest_pool_blocks: int = field(init=False, default=0)
    is_one_pool: bool = field(init=False, default=False)
    is_any_lost: bool = field(init=False, default=False)
    _pools: dict[int, _Pool] = field(init=False, default_factory=dict)
    _pools_made: int = field(init=False, default=0)
    _held: dict[BlockOwner, list[int]] = field(init=False, default_factory=dict)
    _pinned: set[BlockOwner] = field(init=False, default_factory=set)
    _quarantined: dict[BlockOwner, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.first_pool_blocks:
            self.add_pool(self.first_pool_blocks)

    # pools

    def add_pool(self, total_blocks: int) -> int:
        """The new pool's number, which no other has had."""
        if total_blocks < 1:
            raise ValueError(f"a pool of {total_blocks} blocks")
        number = self._pools_made
        self._pools_made += 1
        first = number * POOL_STRIDE
        self._pools[number] = _Pool(total_blocks, list(range(first, first + total_blocks)))
        self._count_pools()
        return number

    @property
    def next_pool(self) -> int:
        """The number that the next pool will have."""
        return self._pools_made

    def close_pool(self, pool: int) -> None:
        """Nobody new is given blocks there; who is there stays and grows."""
        self._pools[pool].is_open = False
        self._count_pools()

    def lose_pool(self, pool: int) -> None:
        """Its memory is gone. It disappears when its last owner lets go."""
        lost = self._pools[pool]
        lost.is_open, lost.is_lost, lost.free = False, True, []
        self._forget_if_empty(pool)
        self._count_pools()

    def remove_pool(self, pool: int) -> None:
        """Raises ValueError where somebody holds, or may still write, its blocks."""
        if self._pools[pool].total_blocks != len(self._pools[pool].free):
            raise ValueError(f"pool {pool} is in use")
        del self._pools[pool]
        self._count_pools()

    @property
    def pools(self) -> list[int]:
        """Those that exist, lost ones with owners among them."""
        return list(self._pools)

    @property
    def open_pools(self) -> list[int]:
        return [number for number, pool in self._pools.items() if pool.is_open]

    def is_lost(self, owner: BlockOwner) -> bool:
        """Whether what the owner's blocks held is gone."""
        return self._pools[self.pool_of(owner)].is_lost

    def is_lost_pool(self, pool: int) -> bool:
        """Also of one that has disappeared."""
        return pool not in self._pools or self._pools[pool].is_lost

    def is_unused(self, pool: int) -> bool:
        return len(self._pools[pool].free) == self._pools[pool].total_blocks

    def pool_for_newcomer(self, longest_blocks: int) -> int | None:
        """Of the open pools that are large enough for it in the end, the one with the most free blocks
        (request-level partition, balanced by context length: Lamina 2, section 5); None without any."""
        found, most = None, -1
        for number, pool in self._pools.items():
            if pool.is_open and pool.total_blocks >= longest_blocks and len(pool.free) > most:
                found, most = number, len(pool.free)
        return found

    def free_blocks_in(self, pool: int) -> int:
        return len(self._pools[pool].free)

    def total_blocks_in(self, pool: int) -> int:
        return self._pools[pool].total_blocks

    # counts

    @property
    def used_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._quarantined.values())

    # owners

    def block_table(self, owner: BlockOwner) -> list[int]:
        """The owner's blocks in sequence order. A live view: it grows with the owner."""
        return self._held[owner]

    def pool_of(self, owner: BlockOwner) -> int:
        return pool_of(self._held[owner][0])

    def owners(self) -> list[BlockOwner]:
        """Everyone who holds blocks."""
        return list(self._held)

    def is_pinned(self, owner: BlockOwner) -> bool:
        return owner in self._pinned

    def is_quarantined(self, owner: BlockOwner) -> bool:
        return owner in self._quarantined

    def try_allocate(self, owner: BlockOwner, blocks: int, pool: int | None = None) -> bool:
        """Gives ``owner`` that many more blocks (at least one), all or none. ``pool``: where a newcomer is to
        live; None: in ``pool_for_newcomer``, which need not hold more."""
        if owner in self._quarantined:
            raise ValueError(f"{owner} is in quarantine")
        if blocks < 1:
            raise ValueError(f"{blocks} blocks asked for")
        if owner in self._held:
            number: int | None = self.pool_of(owner)
        else:
            number = self.pool_for_newcomer(blocks) if pool is None else pool
        if number is None or blocks > len(self._pools[number].free):
            return False
        given = self._pools[number]
        free = given.free
        if self.has_pages:
            taken = [heapq.heappop(free) for _ in range(blocks)]
        else:
            taken = free[-blocks:]
            del free[-blocks:]
        if given.is_open:
            self.free_blocks -= blocks
        held = self._held.get(owner)
        if held is None:
            self._held[owner] = taken
        else:
            held += taken
        return True

    def hold(self, owner: BlockOwner, blocks: Sequence[int]) -> None:
        """Gives ``owner`` these very blocks, which hold its KV already. Raises ValueError if any is taken."""
        pool = self._pools[pool_of(blocks[0])]
        if owner in self._held or owner in self._quarantined or not {*blocks} <= {*pool.free}:
            raise ValueError(f"{owner} cannot be given {blocks}")
        pool.free = [block for block in pool.free if block not in {*blocks}]
        if self.has_pages:
            heapq.heapify(pool.free)
        self._held[owner] = list(blocks)
        self._count_pools()

    def release(self, owner: BlockOwner) -> None:
        """Frees the owner's blocks."""
        if owner in self._pinned:
            raise ValueError(f"{owner} is pinned: a transfer reads its blocks")
        self._return(self._held.pop(owner))

    def replace(self, owner: BlockOwner, by: BlockOwner) -> None:
        """Frees the owner's blocks and gives it those of ``by``, who holds nothing any more."""
        if by not in self._held:
            raise KeyError(by)
        self.release(owner)
        self._held[owner] = self._held.pop(by)

    def rename(self, owner: BlockOwner, to: BlockOwner) -> None:
        """All blocks of ``owner`` are those of ``to``, who held none. Raises ValueError amid a transfer."""
        if owner in self._pinned:
            raise ValueError(f"{owner} is pinned: a transfer reads its blocks")
        if to in self._held or to in self._quarantined:
            raise ValueError(f"{to} has blocks already")
        self._held[to] = self._held.pop(owner)

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
        seen = [block for pool in self._pools.values() for block in pool.free]
        for blocks in (*self._held.values(), *self._quarantined.values()):
            assert len({pool_of(block) for block in blocks}) == 1, "an owner's blocks are of several pools"
            if not self._pools[pool_of(blocks[0])].is_lost:
                seen.extend(blocks)
        expected = [
            number * POOL_STRIDE + block
            for number, pool in self._pools.items()
            if not pool.is_lost
            for block in range(pool.total_blocks)
        ]
        assert sorted(seen) == sorted(expected), "a block is lost or held twice"
        free = sum(len(pool.free) for pool in self._pools.values() if pool.is_open)
        assert self.free_blocks == free, "the free blocks are wrongly counted"
        assert self._pinned <= self._held.keys(), "a pinned owner holds nothing"
        assert not self._held.keys() & self._quarantined.keys(), "an owner is held and in quarantine"

    def _return(self, blocks: list[int]) -> None:
        number = pool_of(blocks[0])
        pool = self._pools[number]
        if pool.is_lost:
            self._forget_if_empty(number)
            return
        if self.has_pages:
            for block in blocks:
                heapq.heappush(pool.free, block)
        else:
            pool.free += blocks
        if pool.is_open:
            self.free_blocks += len(blocks)

    def _forget_if_empty(self, pool: int) -> None:
        users = (*self._held.values(), *self._quarantined.values())
        if not any(pool_of(blocks[0]) == pool for blocks in users):
            del self._pools[pool]
            self._count_pools()

    def _count_pools(self) -> None:
        """After one of them has changed."""
        pools = self._pools.values()
        self.free_blocks = sum([len(pool.free) for pool in pools if pool.is_open])
        self.total_blocks = sum([pool.total_blocks for pool in pools if not pool.is_lost])
        self.largest_pool_blocks = max([pool.total_blocks for pool in pools if pool.is_open], default=0)
        self.is_one_pool = len(pools) == 1
        self.is_any_lost = True in [pool.is_lost for pool in pools]


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` positions."""
    return -(-tokens // block_size)
