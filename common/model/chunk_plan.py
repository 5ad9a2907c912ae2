"""Attention of a prompt's chunk, planned once per step: to its history in the pool, and causally to itself.

The two are parts over disjoint keys: the first is computed as soon as Q is there, the second when K and V
are, and their log-sum-exps merge them exactly (``attention_kernels``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.attention_kernels import Partial, merge_two, partial_attention
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class History:
    """A chunk's earlier tokens in the pool: pages ``first``..``stop`` as they lie, or gathered ``rows``.

    ``skipped``: leading tokens of the first page that the window hides; ``tokens``: those after them. A
    window leaves them to the chunk's first ``queries`` alone, by ``mask`` [queries, tokens].
    """

    tokens: int
    skipped: int
    first: int
    stop: int
    rows: torch.Tensor | None
    queries: int
    mask: torch.Tensor | None

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """[blocks, kv_heads, block_size, head_dim] → [1, kv_heads, tokens, head_dim]."""
        kv_heads, head_dim = pages.shape[1], pages.shape[3]
        if self.rows is not None:
            gathered = pages.view(-1, head_dim).index_select(0, self.rows)
            return gathered.view(1, kv_heads, self.tokens, head_dim)
        pages = pages[self.first : self.stop].transpose(0, 1)
        return pages.reshape(1, kv_heads, -1, head_dim).narrow(2, self.skipped, self.tokens)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Rows ``begin``..``stop`` of the batch. ``mask`` [queries, queries] where a window cuts; else causal."""

    begin: int
    stop: int
    history: History | None
    mask: torch.Tensor | None

    def attend_before(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> Partial | None:
        """The whole batch's ``q`` [T, heads, head_dim] → the part over the layer's pages; None without."""
        if self.history is None:
            return None
        return partial_attention(
            _of_one(q[self.begin : self.begin + self.history.queries]),
            self.history.read(keys),
            self.history.read(values),
            spec.scale,
            mask=self.history.mask,
            softcap=spec.softcap,
        )

    def attend_new(
        self, before: Partial | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """The whole batch's ``q``, ``k``, ``v`` → the chunk's output [rows, heads, head_dim]."""
        own_q, own_k, own_v = (_of_one(part[self.begin : self.stop]) for part in (q, k, v))
        is_causal = self.mask is None
        output, lse = partial_attention(
            own_q, own_k, own_v, spec.scale, mask=self.mask, is_causal=is_causal, softcap=spec.softcap
        )
        if before is not None:
            queries = before[1].shape[2]
            merged, _ = merge_two(before, (output[:, :, :queries], lse[:, :, :queries]))
            is_whole = queries == output.shape[2]
            output = merged if is_whole else torch.cat([merged, output[:, :, queries:]], dim=2)
        return output.squeeze(0).transpose(0, 1)


def _of_one(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] → [1, heads, tokens, head_dim]."""
    return rows.transpose(0, 1).unsqueeze(0)


def plan_chunk(first_row: int, chunk: SequenceChunk, window: int | None, pool: KVPool) -> ChunkPlan:
    stop = first_row + chunk.length
    end = chunk.start + chunk.length
    if window is None or end <= window:
        history = _plan_history(chunk, 0, pool, chunk.length, None) if chunk.start else None
        return ChunkPlan(first_row, stop, history, None)
    begin = max(0, chunk.start + 1 - window)
    seeing = min(chunk.length, window - 1)
    history = None
    if begin < chunk.start and seeing:
        mask = _window_mask(chunk.start, chunk.start + seeing, begin, chunk.start, window, pool)
        history = _plan_history(chunk, begin, pool, seeing, mask)
    if chunk.length <= window:
        return ChunkPlan(first_row, stop, history, None)
    own = _window_mask(chunk.start, end, chunk.start, end, window, pool)
    return ChunkPlan(first_row, stop, history, own)


def _window_mask(
    first_query: int, last_query: int, first_key: int, last_key: int, window: int, pool: KVPool
) -> torch.Tensor:
    """Additive [queries, keys] of the positions first..last (exclusive)."""
    queries = torch.arange(first_query, last_query)[:, None]
    keys = torch.arange(first_key, last_key)[None, :]
    hidden = (keys > queries) | (keys <= queries - window)
    mask = torch.zeros(hidden.shape, dtype=pool.dtype).masked_fill_(hidden, float("-inf"))
    return mask.to(pool.device)


def _plan_history(
    chunk: SequenceChunk, begin: int, pool: KVPool, queries: int, mask: torch.Tensor | None
) -> History:
    """The sequence's tokens from ``begin`` up to the chunk; adjacent pages are read as they lie."""
    size, end = pool.layout.block_size, chunk.start
    pages = list(chunk.block_table[begin // size : -(-end // size)])
    if pages == list(range(pages[0], pages[0] + len(pages))):
        return History(end - begin, begin % size, pages[0], pages[-1] + 1, None, queries, mask)
    slots = row_slots(chunk.block_table, begin, end, pool.layout)
    return History(end - begin, 0, 0, 0, slots.t().reshape(-1).to(pool.device), queries, mask)


def row_slots(block_table: Sequence[int], begin: int, end: int, layout: KVLayout) -> torch.Tensor:
    """[tokens, kv_heads]: where each token's rows lie in a layer's pages seen as rows of head_dim."""
    size, heads = layout.block_size, layout.kv_heads
    tokens = torch.arange(begin, end)
    table = torch.tensor(block_table, dtype=torch.int64)
    in_head = table[tokens // size] * (heads * size) + tokens % size
    return in_head[:, None] + torch.arange(heads) * size
