"""The one pool that both rooms of an instance take blocks from: what one frees, the other may wait for."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.kv.blocks import BlockAllocator, BlockOwner


@dataclass(slots=True)
class SharedBlocks:
    """Heard after every event of either room."""

    blocks: BlockAllocator
    _free: int = field(init=False)

    def __post_init__(self) -> None:
        self._free = self.blocks.free_blocks

    def note_change(self, tell_other: Callable[[], None]) -> None:
        """``tell_other``: than that room whose event it was. It is told once the event is over."""
        before, self._free = self._free, self.blocks.free_blocks
        if self._free > before:
            asyncio.get_running_loop().call_soon(tell_other)


def leaked_blocks(blocks: BlockAllocator, known: Iterable[BlockOwner]) -> int:
    """Held for attempts that nobody knows, in whatever room: nobody will free them. Between two events only:
    amid one, blocks change hands."""
    attempts = {(owner.request_id, owner.attempt) for owner in known}
    return sum(
        len(blocks.block_table(owner))
        for owner in blocks.owners()
        if (owner.request_id, owner.attempt) not in attempts
    )
