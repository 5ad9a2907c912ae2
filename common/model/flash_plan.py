"""Attention on CUDA devices, planned once per step: the whole ragged batch in one call of torch's flash
kernel (FlashAttention-2, variable lengths), over each sequence's tokens gathered from the pool, new ones too.

Chunks and decode steps are alike to it. It begins when K and V are there: to compute what there is of the
earlier tokens before that takes more launches of kernels, and launches are what a step in one process waits
for. Attention workers lose by it that they compute while K and V are on their way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv.pool import KVPool
from common.model.attention_kernels import Before, Pages
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec

MOST_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)
"""Of the device: Ampere's."""


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """``rows`` [tokens · kv_heads]: what is seen of each sequence in turn, in a layer's pages seen as rows of
    head_dim. ``query_ends``, ``key_ends`` [sequences + 1] int32: where each one's new tokens and seen ones
    end, from 0 on; ``most_queries``, ``most_keys`` of one sequence."""

    rows: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int
    window: int | None

    def attend_before(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> Before:
        return Before(q, None, ())

    def attend_new(
        self, before: Before, pages: Pages, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """[T, heads, head_dim], of K and V that ``pages`` hold by now."""
        head_dim = spec.head_dim
        keys, values = (
            plane.view(-1, head_dim).index_select(0, self.rows).view(-1, spec.kv_heads, head_dim)
            for plane in pages
        )
        return flash_attention(before.q, keys, values, self, spec.scale)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: FlashPlan, scale: float
) -> torch.Tensor:
    """``q`` [T, heads, head_dim] over ``k``, ``v`` [keys, kv_heads, head_dim]: each sequence's last query
    sees all its keys up to the last, each before one less, and none more than ``plan.window``."""
    output: torch.Tensor
    output, *_ = torch.ops.aten._flash_attention_forward.default(
        q,
        k,
        v,
        plan.query_ends,
        plan.key_ends,
        plan.most_queries,
        plan.most_keys,
        0.0,
        plan.window is None,
        False,
        scale=scale,
        window_size_left=None if plan.window is None else plan.window - 1,
        window_size_right=None if plan.window is None else 0,
    )
    return output


def has_flash(pool: KVPool, has_softcap: bool) -> bool:
    """Whether the kernel takes such attention."""
    head_dim = pool.layout.head_dim
    return (
        pool.device.type == "cuda"
        and pool.dtype is torch.bfloat16
        and head_dim <= MOST_HEAD_DIM
        and head_dim % 8 == 0
        and not has_softcap
        and torch.cuda.get_device_capability(pool.device) >= LEAST_CAPABILITY
    )


def plan_flash(chunks: Sequence[SequenceChunk], window: int | None, pool: KVPool) -> FlashPlan:
    """The indices of tokens are made on the device, from the block tables."""
    layout, device = pool.layout, pool.device
    size, kv_heads = layout.block_size, layout.kv_heads
    counts = keys_of(chunks, window)
    firsts = [each.start + each.length - count for each, count in zip(chunks, counts, strict=True)]
    pages = [-(-(each.start + each.length) // size) for each in chunks]
    tables: list[int] = []
    for chunk, used in zip(chunks, pages, strict=True):
        tables += chunk.block_table[:used]
    key_ends, query_ends = _ends(counts), _ends([each.length for each in chunks])
    # Of each sequence: how far its tokens' places among all lie from their positions, and its first page.
    shifts = [first - end for first, end in zip(firsts, key_ends, strict=False)]
    facts = torch.tensor([counts, shifts, _ends(pages)[:-1]], dtype=torch.int64, device=device)
    total = key_ends[-1]
    of_token = torch.repeat_interleave(facts[1:], facts[0], dim=1, output_size=total)
    positions = torch.arange(total, device=device) + of_token[0]
    blocks = torch.tensor(tables, dtype=torch.int64, device=device)[of_token[1] + positions // size]
    in_head = blocks * (kv_heads * size) + positions % size
    rows = in_head[:, None] + torch.arange(kv_heads, device=device) * size
    return FlashPlan(
        rows=rows.view(-1),
        query_ends=torch.tensor(query_ends, dtype=torch.int32, device=device),
        key_ends=torch.tensor(key_ends, dtype=torch.int32, device=device),
        most_queries=max(each.length for each in chunks),
        most_keys=max(counts),
        window=window,
    )


def keys_of(chunks: Sequence[SequenceChunk], window: int | None) -> list[int]:
    """How many tokens of each sequence are seen by any of its new ones."""
    if window is None:
        return [each.start + each.length for each in chunks]
    return [each.length + min(each.start, window - 1) for each in chunks]


def _ends(lengths: Sequence[int]) -> list[int]:
    """From 0 on: one more than there are."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends
