"""Paged attention of decode steps, compiled: one new token a sequence, straight out of the pages.

The part over the tokens before runs as soon as Q is there; the new token's part is merged in when K and V
are (Infinite-LLM, Lamina 1, section 4.1), so that a remote worker computes while these are on their way.
"""

from collections.abc import Sequence

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
    """One step's rows, in order, for all layers. fp32 on the host; each chunk is of one token."""

    def __init__(
        self,
        kernels: KernelLibrary,
        chunks: Sequence[SequenceChunk],
        pool: KVPool,
        windows: set[int | None],
    ) -> None:
        self._kernels = kernels
        layout = pool.layout
        size = layout.block_size
        self._pool = pool
        self._rows = len(chunks)
        tables = [np.asarray(chunk.block_table, dtype=np.int64) for chunk in chunks]
        firsts = np.cumsum([0, *map(len, tables)])[:-1]
        self._tables = np.concatenate(tables)
        starts = [chunk.start for chunk in chunks]
        self._slots = np.array(
            [table[start // size] * size + start % size for table, start in zip(tables, starts, strict=True)],
            dtype=np.int64,
        )
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
        self._scratch = np.empty(0, dtype=np.float32)
        self._q = self._output = self._lses = torch.empty(0)

    def attend_before(self, layer: int, q: torch.Tensor, spec: AttentionSpec) -> None:
        """``q`` [rows, heads, head_dim] over each row's tokens before the new one."""
        layout = self._pool.layout
        q = self._q = _in_rows(q)
        output = self._output = torch.empty(self._rows, spec.heads, layout.head_dim)
        lses = self._lses = torch.empty(self._rows, spec.heads)
        spans = self._spans[spec.window]
        group = spec.heads // layout.kv_heads
        floats = group * (layout.block_size + 2)
        if len(self._scratch) < COMPUTERS * floats:
            self._scratch = np.empty(COMPUTERS * floats, dtype=np.float32)
        items = self._rows * layout.kv_heads
        arguments = (
            ATTEND,
            q.data_ptr(),
            self._pool.keys[layer].data_ptr(),
            self._pool.values[layer].data_ptr(),
            output.data_ptr(),
            lses.data_ptr(),
            self._tables.ctypes.data,
            spans.ctypes.data,
            self._scratch.ctypes.data,
            spec.heads,
            layout.kv_heads,
            layout.head_dim,
            layout.block_size,
            q.stride(0),
            floats,
            _bits(spec.scale),
            _bits(spec.softcap or 0.0),
            items,
        )
        own_crew(self._kernels).run(arguments, min(items, MOST_PARTS))

    def take_new(self, layer: int, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Writes ``k``, ``v`` [rows, kv_heads, head_dim] into the pool; the output of all the tokens."""
        layout = self._pool.layout
        width = layout.head_dim
        keys, values = (_in_rows(each) for each in (k, v))
        for pages, rows in ((self._pool.keys[layer], keys), (self._pool.values[layer], values)):
            self._kernels.store_rows(
                rows.data_ptr(),
                pages.data_ptr(),
                self._slots.ctypes.data,
                self._rows,
                layout.kv_heads,
                width,
                rows.stride(0),
                layout.block_size,
            )
        self._kernels.merge_new_token(
            self._q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self._output.data_ptr(),
            self._lses.data_ptr(),
            self._rows,
            spec.heads,
            layout.kv_heads,
            width,
            self._q.stride(0),
            keys.stride(0),
            values.stride(0),
            spec.scale,
            spec.softcap or 0.0,
        )
        return self._output


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, width] with each token's heads side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _bits(value: float) -> int:
    """A float32 as it travels among a job's words."""
    return int(np.float32(value).view(np.uint32))
