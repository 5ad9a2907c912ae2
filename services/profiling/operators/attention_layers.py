"""Operators over sequences: attention of a prompt's chunk and of a decode step, and saving their KV.

They are those of instances (``common.model.attention``), over a pool of several layers. Every layer of a pass
that is measured lies elsewhere in the pool, so that KV comes from memory, as in a pass of the whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.attention import Plan, plan_step, save_kv, slots_of
from common.model.attention_kernels import Pages
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec
from services.profiling.operators.laps import Laps
from services.profiling.operators.sizes import KV_BYTES, Shard
from services.profiling.operators.token_layers import Attend, Weights

LEAST_LAYERS = 2


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Of ``batch`` sequences each with ``before`` tokens in the pool and ``tokens`` new ones."""

    batch: int
    before: int
    tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.tokens > 1

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def operator(self) -> str:
        return "attn_prefill" if self.is_prefill else "attn_decode"

    def blocks(self, block_size: int) -> int:
        return self.batch * blocks_for(self.before + self.tokens, block_size)


class AttentionLayers:
    def __init__(
        self, shard: Shard, weights: Weights, block_size: int, cases: Sequence[AttentionCase]
    ) -> None:
        """A pool in which every case has room."""
        head_dim = shard.shape.head_dim
        self._shard, self._weights, self._block_size = shard, weights, block_size
        self._spec = AttentionSpec(shard.heads, shard.kv_heads, head_dim, head_dim**-0.5)
        blocks = max(case.blocks(block_size) for case in cases)
        one = KVLayout(1, shard.kv_heads, head_dim, block_size, weights.dtype.itemsize)
        layers = max(LEAST_LAYERS, min(shard.shape.layers, KV_BYTES // one.pool_bytes(blocks)))
        layout = KVLayout(layers, shard.kv_heads, head_dim, block_size, weights.dtype.itemsize)
        self._pool = KVPool(layout, blocks, weights.dtype, weights.device)
        # Zeroed memory that nobody has written to may be one page, over and over, in a cache.
        weights.fill(self._pool.tensor.view(weights.dtype))

    def of_layers(self, case: AttentionCase, number: int, layers: int, laps: Laps) -> list[Attend]:
        """Of a pass through so many layers. ``number`` says how many there were before it."""
        planes = list(zip(self._pool.keys, self._pool.values, strict=True))
        rounds = -(-layers // len(planes))
        found: list[Attend] = []
        for place in range(number * rounds, (number + 1) * rounds):
            chunks = self._chunks(case, place)
            plan = plan_step(chunks, None, self._pool)
            slots = slots_of(chunks, self._pool.layout, self._pool.device)
            found += [partial(self._attend, pages, plan, slots, case.operator, laps) for pages in planes]
        return found[:layers]

    def _attend(
        self,
        pages: Pages,
        plan: Plan,
        slots: torch.Tensor,
        operator: str,
        laps: Laps,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        laps.mark(None)
        save_kv(pages, slots, k, v)
        laps.mark("attn_kv_cache_save")
        before = plan.attend_before(q, *pages, self._spec)
        attended = plan.attend_new(before, pages, k, v, self._spec)
        laps.mark(operator)
        return attended

    def _chunks(self, case: AttentionCase, place: int) -> list[SequenceChunk]:
        """Of adjacent blocks, at one of the places that the pool has for as many."""
        blocks = case.blocks(self._block_size)
        each, first = blocks // case.batch, place % (self._pool.total_blocks // blocks) * blocks
        tables = (range(begin, begin + each) for begin in range(first, first + blocks, each))
        return [SequenceChunk(table, case.before, case.tokens) for table in tables]
