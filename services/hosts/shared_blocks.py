"""The one pool that both rooms of an instance take blocks from: what one frees, the other may wait for."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from common.kv.blocks import BlockAllocator


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
