"""The host tier of a real pool: memory of the host in which blocks of KV wait.

It is block-major, [blocks, planes, page bytes], a plane being one layer's keys or values: what is one block
there is one stretch, so a device's pages are gathered on the device and cross its bus in long copies. Beside
a device the memory is page-locked; beside a pool on the host it is ordinary, and taken as it is used.
"""

from collections.abc import Iterator, Sequence

import torch

from common.kv.pool import KVPool

COPY_BYTES = 64 << 20
"""Of one copy at most: a device needs as much once more to gather it."""


class HostMemory:
    """A ``HostTier``. Raises ValueError for less than one block."""

    def __init__(self, pool: KVPool, total_blocks: int) -> None:
        if total_blocks < 1:
            raise ValueError(f"total_blocks = {total_blocks}: must be at least 1")
        layout = pool.layout
        self._device = pool.device
        self._pages = pool.tensor.view(2 * layout.layers, pool.total_blocks, layout.page_bytes)
        self._memory = torch.empty(
            total_blocks,
            2 * layout.layers,
            layout.page_bytes,
            dtype=torch.uint8,
            pin_memory=pool.device.type == "cuda",
        )
        self._block_bytes = layout.block_bytes

    @property
    def total_blocks(self) -> int:
        return len(self._memory)

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> int:
        for here, there in self._stretches(blocks, host_blocks):
            self._memory[there].copy_(self._pages[:, here].transpose(0, 1), non_blocking=True)
        return self._wait(host_blocks)

    def copy_in(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> int:
        for here, there in self._stretches(blocks, host_blocks):
            self._pages[:, here].transpose(0, 1).copy_(self._memory[there], non_blocking=True)
        return self._wait(host_blocks)

    def _wait(self, host_blocks: Sequence[int]) -> int:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return len(host_blocks) * self._block_bytes

    def _stretches(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Blocks adjacent on both sides are copied at once."""
        most = max(1, COPY_BYTES // self._block_bytes)
        begin = 0
        for end in range(1, len(blocks) + 1):
            is_over = (
                end == len(blocks)
                or end - begin == most
                or blocks[end] != blocks[end - 1] + 1
                or host_blocks[end] != host_blocks[end - 1] + 1
            )
            if is_over:
                here, there = blocks[begin], host_blocks[begin]
                yield slice(here, here + end - begin), slice(there, there + end - begin)
                begin = end
