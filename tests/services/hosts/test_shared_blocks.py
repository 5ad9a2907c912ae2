"""Blocks that nobody will ever free are seen."""

from common.ids import RequestId
from common.kv.blocks import BlockAllocator, BlockOwner
from services.hosts.shared_blocks import leaked_blocks


def owner(room: str, name: str) -> BlockOwner:
    return BlockOwner(room, RequestId(name), 0)


def test_blocks_held_for_a_sequence_that_no_room_knows_are_leaked() -> None:
    blocks = BlockAllocator(8)
    for holder, held in ((owner("prefill", "a"), 2), (owner("decode", "b"), 3), (owner("move", "b"), 1)):
        assert blocks.try_allocate(holder, held)
    known = [owner("prefill", "a"), owner("decode", "b")]
    assert leaked_blocks(blocks, known) == 0
    assert leaked_blocks(blocks, known[:1]) == 4
    assert leaked_blocks(blocks, known[1:]) == 2


def test_another_attempt_of_the_same_request_holds_its_own() -> None:
    blocks = BlockAllocator(8)
    assert blocks.try_allocate(owner("decode", "a"), 2)
    assert leaked_blocks(blocks, [BlockOwner("decode", RequestId("a"), 1)]) == 2


def test_blocks_in_quarantine_are_not_leaked() -> None:
    blocks = BlockAllocator(8)
    assert blocks.try_allocate(owner("decode", "a"), 2)
    blocks.quarantine(owner("decode", "a"))
    assert leaked_blocks(blocks, []) == 0
