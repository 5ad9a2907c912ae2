"""Paged attention of decode steps, compiled: one new token a sequence, straight out of the pages.

The part over the tokens before runs as soon as Q is there; the new token's part is merged in when K and V
are (Infinite-LLM, Lamina 1, section 4.1), so that a remote worker computes while these are on their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.kv.pool import KVPool
from common.model.cpu.crew import own_crew
from common.model.cpu.jobs import ATTEND, MOST_PARTS
from common.model.cpu.library import KernelLibrary
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec

COMPUTERS = 2
"""Who may hold scratch memory at once: the thread and its helper."""


class DecodeStep:
    """One step's rows, in order, for all layers. fp32 on the host; each chunk is of one token.

    ``output`` [rows, heads, head_dim] takes every layer's output; None makes a tensor for each."""

    def __init__(
        self,
        kernels: KernelLibrary,
        chunks: Sequence[SequenceChunk],
        pool: KVPool,
        windows: set[int | None],
        output: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels
        layout = pool.layout
        size = layout.block_size
        self._pool = pool
        self._rows = len(chunks)
        tables = [np.asarray(chunk.block_table, dtype=np.int64) for chunk in chunks]
        firsts = np.cumsum([0, *map(len, tables)])[:-1]
        self._tables = np.concatenate(tables)
        if self._tables.min() < 0 or self._tables.max() >= pool.total_blocks:  # nothing below looks
            raise ValueError(f"a block table leaves the pool of {pool.total_blocks} blocks")
        starts = [chunk.start for chunk in chunks]
        self._slots = np.array(
            [table[start // size] * size + start % size for table, start in zip(tables, starts, strict=True)],
            dtype=np.int64,
        )
        self._slots_address = self._slots.ctypes.data
        self._crew = own_crew(kernels)
        self._spans = {
            window: np.array(
                [
                    (first, 0 if window is None else max(0, start + 1 - window), start)
                    for first, start in zip(firsts, starts, strict=True)
                ],
                dtype=np.int64,
            )
            for window in windows
        }
        self._fixed: dict[AttentionSpec, _Fixed] = {}
        self._place = output
        self._q = self._output = self._lses = torch.empty(0)

    def attend_before(self, layer: int, q: torch.Tensor, spec: AttentionSpec) -> None:
        """``q`` [rows, heads, head_dim] over each row's tokens before the new one."""
        fixed = self._fixed.get(spec)
        if fixed is None:
            fixed = self._fixed[spec] = self._fixed_for(spec)
        q = self._q = _in_rows(q)
        output = self._output = torch.empty(fixed.output_shape) if self._place is None else self._place
        lses = self._lses = fixed.lses
        pool = self._pool
        addresses = (
            ATTEND,
            q.data_ptr(),
            pool.keys[layer].data_ptr(),
            pool.values[layer].data_ptr(),
            output.data_ptr(),
            lses.data_ptr(),
            q.stride(0),
        )
        self._crew.run(addresses + fixed.arguments, fixed.parts)

    def _fixed_for(self, spec: AttentionSpec) -> "_Fixed":
        layout = self._pool.layout
        floats = spec.heads // layout.kv_heads * (layout.block_size + 2)
        scratch = np.empty(COMPUTERS * floats, dtype=np.float32)
        items = self._rows * layout.kv_heads
        arguments = (
            self._tables.ctypes.data,
            self._spans[spec.window].ctypes.data,
            scratch.ctypes.data,
            floats,
            spec.heads,
            layout.kv_heads,
            layout.head_dim,
            layout.block_size,
            _bits(spec.scale),
            _bits(spec.softcap or 0.0),
            items,
        )
        shape = (self._rows, spec.heads, layout.head_dim)
        if self._place is not None and (self._place.shape != shape or not self._place.is_contiguous()):
            raise ValueError(f"an output of {(*self._place.shape,)} for {shape}")  # nothing below looks
        return _Fixed(arguments, min(items, MOST_PARTS), shape, scratch, torch.empty(shape[:2]))

    def take_new(self, layer: int, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Writes ``k``, ``v`` [rows, kv_heads, head_dim] into the pool; the output of all the tokens."""
        layout, pool, q = self._pool.layout, self._pool, self._q
        keys, values = _in_rows(k), _in_rows(v)
        self._kernels.take_new_token(
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self._output.data_ptr(),
            self._lses.data_ptr(),
            pool.keys[layer].data_ptr(),
            pool.values[layer].data_ptr(),
            self._slots_address,
            self._rows,
            spec.heads,
            layout.kv_heads,
            layout.head_dim,
            q.stride(0),
            keys.stride(0),
            values.stride(0),
            layout.block_size,
            spec.scale,
            spec.softcap or 0.0,
        )
        return self._output


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What a step's layers with one spec have in common. ``arguments`` follow the layer's addresses, among
    them that of ``scratch``. ``lses`` [rows, heads]: each layer's log-sum-exps."""

    arguments: tuple[int, ...]
    parts: int
    output_shape: tuple[int, int, int]
    scratch: np.ndarray[Any, np.dtype[np.float32]]
    lses: torch.Tensor


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, width] with each token's heads side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _bits(value: float) -> int:
    """A float32 as it travels among a job's words."""
    return int(np.float32(value).view(np.uint32))
