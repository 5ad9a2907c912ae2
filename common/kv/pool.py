"""The KV pool's memory as tensors: one buffer, a K and a V view per layer."""

import torch

from common.errors import ModelError
from common.kv.layout import KVLayout


class KVPool:
    """``keys[layer]``, ``values[layer]``: ``[blocks, kv_heads, block_size, head_dim]`` views of one buffer.

    ``buffer`` is host memory that others can reach (``common.transfer.SharedBuffer.memory``); None lets torch
    allocate, on any device. The views keep the buffer alive.
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
            raise ModelError(
                f"KV pool: {dtype} has {dtype.itemsize} bytes, the layout {layout.element_bytes}"
            )
        self.layout = layout
        self.total_blocks = total_blocks
        self.dtype = dtype
        self.device = device
        self.nbytes = layout.pool_bytes(total_blocks)
        if buffer is None:
            self.tensor = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        else:
            if device.type != "cpu" or buffer.nbytes < self.nbytes:
                raise ModelError(
                    f"KV pool: a host buffer of {buffer.nbytes} bytes for {self.nbytes} bytes on {device}"
                )
            self.tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=self.nbytes)
        pages = self.tensor.view(dtype).view(
            layout.layers, 2, total_blocks, layout.kv_heads, layout.block_size, layout.head_dim
        )
        self.keys = tuple(pages[layer, 0] for layer in range(layout.layers))
        self.values = tuple(pages[layer, 1] for layer in range(layout.layers))
