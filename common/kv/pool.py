"""The memory of a KV pool as tensors: one flat buffer, viewed per layer.

Invariant: the buffer begins as zeros and only finite values are ever written to it. Attention kernels
multiply masked positions by zero, so a NaN in an unused slot would spread.
"""

import torch

from common.kv.layout import KVLayout
from common.transfer.buffers import ForeignMemory, SharedBuffer


class KVPool:
    """``keys[layer]`` and ``values[layer]`` are [blocks, kv_heads, block_size, head_dim] views of ``tensor``.

    ``buffer``: zeroed host memory to live in (shared with other processes, registered for transfers); None
    allocates. Raises ValueError where the buffer does not fit the layout or the device is not the host.
    """

    def __init__(
        self,
        layout: KVLayout,
        total_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        buffer: memoryview | None = None,
    ) -> None:
        if dtype.itemsize != layout.element_bytes:
            raise ValueError(f"dtype = {dtype}: the layout's elements have {layout.element_bytes} bytes")
        if total_blocks < 1:
            raise ValueError(f"total_blocks = {total_blocks}: must be at least 1")
        self.layout = layout
        self.total_blocks = total_blocks
        self.dtype = dtype
        self.device = device
        self.nbytes = layout.pool_bytes(total_blocks)
        self.tensor = _flat_bytes(self.nbytes, device, buffer)
        planes = self.tensor.view(dtype).view(
            layout.layers, 2, total_blocks, layout.kv_heads, layout.block_size, layout.head_dim
        )
        self.keys: tuple[torch.Tensor, ...] = tuple(planes[layer, 0] for layer in range(layout.layers))
        self.values: tuple[torch.Tensor, ...] = tuple(planes[layer, 1] for layer in range(layout.layers))


def _flat_bytes(nbytes: int, device: torch.device, buffer: memoryview | None) -> torch.Tensor:
    if buffer is None:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        raise ValueError(f"device = {device}: a pool in a host buffer must be on the cpu")
    if buffer.readonly or buffer.nbytes < nbytes:
        raise ValueError(
            f"buffer: {buffer.nbytes} bytes, read-only: {buffer.readonly}; must be writable and hold {nbytes}"
        )
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)


def allocate_pool(
    layout: KVLayout, total_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, SharedBuffer | ForeignMemory]:
    """A pool and its memory as transfers know it: on the host, memory that a neighbour process can map; on a
    device, torch's own."""
    if device.type == "cpu":
        shared = SharedBuffer(layout.pool_bytes(total_blocks), "lamella-kv")
        return KVPool(layout, total_blocks, dtype, device, shared.memory), shared
    pool = KVPool(layout, total_blocks, dtype, device)
    return pool, ForeignMemory(pool.tensor.data_ptr(), pool.nbytes, pool.tensor, is_host=False)
