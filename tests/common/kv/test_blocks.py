"""Every block is in exactly one place, whatever is done."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from common.kv.blocks import BlockAllocator, BlockOwner, blocks_for, in_pool


def owner(name: str) -> BlockOwner:
    return BlockOwner("decode", RequestId(name), 0)


def test_blocks_are_handed_out_lowest_first_and_all_or_none() -> None:
    blocks = BlockAllocator(4)
    assert blocks.try_allocate(owner("a"), 2)
    assert blocks.try_allocate(owner("b"), 1)
    blocks.release(owner("a"))
    assert not blocks.try_allocate(owner("c"), 4)
    assert blocks.try_allocate(owner("c"), 3)
    assert blocks.block_table(owner("c")) == [0, 1, 3]
    blocks.check()


def test_pinned_blocks_cannot_be_released_and_quarantined_ones_not_reused() -> None:
    blocks = BlockAllocator(2)
    blocks.try_allocate(owner("a"), 2)
    blocks.pin(owner("a"))
    for move in (blocks.release, blocks.quarantine):
        with pytest.raises(ValueError, match="pinned"):
            move(owner("a"))
    blocks.unpin(owner("a"))
    blocks.quarantine(owner("a"))
    assert (blocks.free_blocks, blocks.used_blocks, blocks.quarantined_blocks) == (0, 0, 2)
    assert not blocks.try_allocate(owner("b"), 1)
    with pytest.raises(ValueError, match="quarantine"):
        blocks.try_allocate(owner("a"), 0)
    blocks.end_quarantine(owner("a"))
    assert blocks.free_blocks == 2
    blocks.check()


def test_blocks_change_their_owner_but_not_amid_a_transfer_nor_to_one_who_has_some() -> None:
    blocks = BlockAllocator(4)
    blocks.try_allocate(owner("a"), 2)
    blocks.try_allocate(owner("b"), 1)
    blocks.pin(owner("a"))
    with pytest.raises(ValueError, match="pinned"):
        blocks.rename(owner("a"), owner("c"))
    blocks.unpin(owner("a"))
    with pytest.raises(ValueError, match="has blocks already"):
        blocks.rename(owner("a"), owner("b"))
    blocks.rename(owner("a"), owner("c"))
    assert blocks.block_table(owner("c")) == [0, 1]
    assert set(blocks.owners()) == {owner("b"), owner("c")}
    blocks.check()


def test_an_owner_goes_on_with_anothers_blocks_and_its_own_are_free() -> None:
    blocks = BlockAllocator(4)
    blocks.add_pool(4)
    blocks.try_allocate(owner("a"), 2, 0)
    blocks.try_allocate(owner("b"), 3, 1)
    there = list(blocks.block_table(owner("b")))
    blocks.pin(owner("a"))
    assert blocks.is_pinned(owner("a"))
    with pytest.raises(ValueError, match="pinned"):
        blocks.replace(owner("a"), owner("b"))
    blocks.unpin(owner("a"))
    with pytest.raises(KeyError):
        blocks.replace(owner("a"), owner("c"))
    blocks.replace(owner("a"), owner("b"))
    blocks.check()
    assert blocks.owners() == [owner("a")]
    assert blocks.block_table(owner("a")) == there
    assert (blocks.free_blocks_in(0), blocks.free_blocks_in(1)) == (4, 1)


@pytest.mark.parametrize("move", ["release", "pin", "unpin", "quarantine", "end_quarantine", "block_table"])
def test_an_unknown_owner_is_an_error(move: str) -> None:
    with pytest.raises(KeyError):
        getattr(BlockAllocator(1), move)(owner("a"))


def test_without_pages_blocks_are_handed_out_as_they_come_and_all_or_none() -> None:
    blocks = BlockAllocator(4, has_pages=False)
    assert blocks.try_allocate(owner("a"), 2)
    assert blocks.try_allocate(owner("b"), 1)
    freed = list(blocks.block_table(owner("a")))
    blocks.release(owner("a"))
    assert not blocks.try_allocate(owner("c"), 4)
    assert blocks.try_allocate(owner("c"), 2)
    assert blocks.block_table(owner("c")) == freed
    blocks.hold(owner("d"), [0])
    blocks.check()
    assert blocks.free_blocks == 0


@given(st.integers(0, 1 << 32), st.booleans())
def test_no_block_is_lost_or_held_twice(seed: int, has_pages: bool) -> None:
    chance = random.Random(seed)
    blocks = BlockAllocator(12, has_pages=has_pages)
    held: set[BlockOwner] = set()
    resting: set[BlockOwner] = set()
    for step in range(60):
        new = owner(f"r{step}")
        if chance.random() < 0.5 and blocks.try_allocate(new, chance.randint(1, 5)):
            held.add(new)
        elif held and chance.random() < 0.6:
            chosen = chance.choice(sorted(held, key=str))
            held.discard(chosen)
            if chance.random() < 0.5:
                blocks.release(chosen)
            else:
                blocks.quarantine(chosen)
                resting.add(chosen)
        elif resting:
            blocks.end_quarantine(resting.pop())
        blocks.check()
    for each in held:
        blocks.release(each)
    for each in resting:
        blocks.end_quarantine(each)
    assert blocks.free_blocks == 12


def test_nobody_holds_nothing() -> None:
    blocks = BlockAllocator(2)
    with pytest.raises(ValueError, match="0 blocks"):
        blocks.try_allocate(owner("a"), 0)
    assert blocks.owners() == []


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_pools_keep_their_owners_apart_and_disappear_when_lost_and_let_go() -> None:
    blocks = BlockAllocator(0)
    assert not blocks.try_allocate(owner("a"), 1)
    first, second = blocks.add_pool(4), blocks.add_pool(6)
    assert blocks.try_allocate(owner("a"), 3)
    assert (blocks.pool_of(owner("a")), in_pool(blocks.block_table(owner("a")))) == (second, (0, 1, 2))
    assert blocks.try_allocate(owner("b"), 1)
    assert blocks.pool_of(owner("b")) == first
    assert not blocks.try_allocate(owner("a"), 4), "another pool's blocks are of no use to it"
    blocks.check()
    blocks.lose_pool(second)
    assert blocks.is_lost(owner("a"))
    assert (blocks.total_blocks, blocks.free_blocks, blocks.largest_pool_blocks) == (4, 3, 4)
    blocks.quarantine(owner("a"))
    blocks.check()
    blocks.end_quarantine(owner("a"))
    assert blocks.pools == [first]
    blocks.close_pool(first)
    assert not blocks.try_allocate(owner("c"), 1)
    assert blocks.try_allocate(owner("b"), 1), "who is there may grow"
    with pytest.raises(ValueError, match="in use"):
        blocks.remove_pool(first)
    blocks.release(owner("b"))
    blocks.remove_pool(first)
    assert blocks.add_pool(1) == 2, "numbers are not used again"
    blocks.check()


def test_blocks_that_hold_kv_already_can_be_held_as_they_are() -> None:
    blocks = BlockAllocator(4)
    blocks.hold(owner("a"), (2, 0))
    assert blocks.block_table(owner("a")) == [2, 0]
    with pytest.raises(ValueError, match="cannot be given"):
        blocks.hold(owner("b"), (0, 1))
    assert blocks.try_allocate(owner("b"), 2)
    blocks.check()
