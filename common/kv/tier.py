"""What a second tier of KV memory offers beside the pool: blocks wait there while they are not needed."""

from collections.abc import Sequence
from typing import Protocol


class HostTier(Protocol):
    """``total_blocks`` of the pool's size. Copies block the caller until they are done, and are made on the
    thread that computes over the pool: never amid one of its steps."""

    @property
    def total_blocks(self) -> int: ...

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> int:
        """From the pool; the bytes copied."""
        ...

    def copy_in(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> int:
        """Into the pool; the bytes copied."""
        ...
