"""Paged attention of sequences with one new token, compiled: straight out of the pages, each to its length.

The part over the tokens before runs as soon as Q is there; the new token's part is merged in when K and V
are (Infinite-LLM, Lamina 1, section 4.1), so that a remote worker computes while these are on their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.kv.pool import KVPool
from common.model.attention_kernels import Partial
from common.model.cpu.crew import CREW, own_crew
from common.model.cpu.jobs import ATTEND_FLOATS, ATTEND_HALVES, MOST_PARTS
from common.model.cpu.library import KernelLibrary
from common.model.page_plan import DecodeRow
from common.spec import AttentionSpec

JOBS = {torch.float32: ATTEND_FLOATS, torch.bfloat16: ATTEND_HALVES}
"""By the pool's dtype, which Q, K and V have, too."""


class PagedRows:
    """Rows of one pass, for all layers. Of a pool on the host whose dtype is among JOBS. Raises ValueError
    for a block table that leaves the pool."""

    def __init__(
        self, kernels: KernelLibrary, rows: Sequence[DecodeRow], pool: KVPool, windows: set[int | None]
    ) -> None:
        self.kernels, self.pool, self.rows = kernels, pool, rows
        tables = [np.asarray(row.block_table, dtype=np.int64) for row in rows]
        firsts = np.cumsum([0, *map(len, tables)])[:-1]
        self._tables = np.concatenate(tables)
        if self._tables.min() < 0 or self._tables.max() >= pool.total_blocks:  # nothing below looks
            raise ValueError(f"a block table leaves the pool of {pool.total_blocks} blocks")
        self._crew = own_crew(kernels)
        self._spans = {
            window: np.array(
                [
                    (first, 0 if window is None else max(0, row.tokens + 1 - window), row.tokens)
                    for first, row in zip(firsts, rows, strict=True)
                ],
                dtype=np.int64,
            )
            for window in windows
        }
        self._fixed: dict[AttentionSpec, _Fixed] = {}

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> Partial:
        """``q`` [rows, heads, head_dim] over each row's tokens before the new one, in a layer's ``keys`` and
        ``values``: fp32, until the next layer with that ``spec`` is attended to."""
        fixed = self._fixed.get(spec)
        if fixed is None:
            fixed = self._fixed[spec] = self._fixed_for(spec)
        q = in_rows(q, self.pool.dtype)
        addresses = (
            JOBS[self.pool.dtype],
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            fixed.output.data_ptr(),
            fixed.lses.data_ptr(),
            q.stride(0),
        )
        self._crew.run(addresses + fixed.arguments, fixed.parts)
        return fixed.output, fixed.lses

    def _fixed_for(self, spec: AttentionSpec) -> "_Fixed":
        layout = self.pool.layout
        floats = spec.heads // layout.kv_heads * (layout.block_size + 2 + layout.head_dim)
        scratch = np.empty(CREW * floats, dtype=np.float32)
        items = len(self.rows) * layout.kv_heads
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
        output = torch.empty(len(self.rows), spec.heads, layout.head_dim)
        return _Fixed(arguments, min(items, MOST_PARTS), output, scratch, torch.empty(output.shape[:2]))


class DecodeStep:
    """A pass of decodes alone, in order, for all layers. As ``PagedRows``.

    ``output`` [rows, heads, head_dim], of the pool's dtype, takes every layer's output; None makes a tensor
    for each."""

    def __init__(self, paged: PagedRows, output: torch.Tensor | None = None) -> None:
        self._paged = paged
        size = paged.pool.layout.block_size
        self._slots = np.array(
            [row.block_table[row.tokens // size] * size + row.tokens % size for row in paged.rows],
            dtype=np.int64,
        )
        self._slots_address = self._slots.ctypes.data
        self._take = paged.kernels.operators[paged.pool.dtype].take_new
        self._place = output
        self._q = self._before = self._lses = torch.empty(0)

    def attend_before(self, layer: int, q: torch.Tensor, spec: AttentionSpec) -> None:
        """``q`` [rows, heads, head_dim] over each row's tokens before the new one."""
        pool = self._paged.pool
        self._q = q = in_rows(q, pool.dtype)
        self._before, self._lses = self._paged.attend(q, pool.keys[layer], pool.values[layer], spec)

    def take_new(self, layer: int, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Writes ``k``, ``v`` [rows, kv_heads, head_dim] into the pool; the output of all the tokens."""
        pool, q, before = self._paged.pool, self._q, self._before
        layout = pool.layout
        keys, values = in_rows(k, pool.dtype), in_rows(v, pool.dtype)
        output = torch.empty(before.shape, dtype=pool.dtype) if self._place is None else self._place
        if output.shape != before.shape or output.dtype != pool.dtype or not output.is_contiguous():
            found = f"an output of {(*output.shape,)} in {output.dtype}"
            raise ValueError(f"{found} for {(*before.shape,)} in {pool.dtype}")  # nothing below looks
        self._take(
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            before.data_ptr(),
            output.data_ptr(),
            self._lses.data_ptr(),
            pool.keys[layer].data_ptr(),
            pool.values[layer].data_ptr(),
            self._slots_address,
            len(self._slots),
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
        return output


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What a pass's layers with one spec have in common. ``arguments`` follow the layer's addresses, among
    them that of ``scratch``. ``output`` [rows, heads, head_dim] and ``lses`` [rows, heads], log-sum-exps:
    each layer's, in turn."""

    arguments: tuple[int, ...]
    parts: int
    output: torch.Tensor
    scratch: np.ndarray[Any, np.dtype[np.float32]]
    lses: torch.Tensor


def in_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, width] with each token's heads side by side. Raises ValueError for another dtype:
    nothing below looks."""
    if x.dtype != dtype:
        raise ValueError(f"{x.dtype} beside a pool of {dtype}")
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _bits(value: float) -> int:
    """A float32 as it travels among a job's words."""
    return int(np.float32(value).view(np.uint32))
