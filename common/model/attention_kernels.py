"""Attention over a part of the keys, and the merge of parts.

A partial result is (output, lse): the attention over some keys and the natural logarithm of the sum of their
exponentiated scores. Two partials of disjoint keys merge exactly (flash decoding; Infinite-LLM's
DistAttention, Adrenaline), so pages, histories and machines can each compute their own.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE_KEYS = 32
"""torch's CPU kernel takes twice as long over 254 keys in bf16 as over 256."""

WHOLE_TILES_FROM = 64
"""Up to so many keys filling up takes as long as it saves: 37 keys 75 us for 72, 90 keys 121 for 156."""

Partial = tuple[torch.Tensor, torch.Tensor]
"""(output [..., queries, head_dim], lse [..., queries] fp32, natural logarithm)"""
Pages = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values, each [blocks, kv_heads, block_size, head_dim]."""


@dataclass(frozen=True, slots=True)
class Before:
    """A layer's Q, and the parts of its attention that need no new K and V."""

    q: torch.Tensor
    decode: Partial | None
    chunks: tuple[Partial | None, ...]


def partial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
) -> Partial:
    """``q`` [B, heads, queries, head_dim] over ``k``, ``v`` [B, kv_heads, keys, head_dim], keys ≥ 1.

    ``mask`` is additive, in q's dtype, broadcast to [B, heads, queries, keys]; every query must see at least
    one key. ``is_causal``: query i sees keys 0..i (queries = keys). Raises ValueError for empty keys, which
    would kill the process inside the CPU kernel.
    """
    if k.shape[2] == 0:
        raise ValueError("attention over no keys: skip the call and keep the other partial")
    if q.device.type == "cpu" and softcap is None:
        if q.dtype is torch.bfloat16 and q.shape[2] > 1:
            k, v, mask = _with_whole_tiles(k, v, mask, is_causal)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return output, lse
    return _partial_by_products(q, k, v, scale, mask, is_causal, softcap)


def _with_whole_tiles(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """With keys behind the others that no query sees: they come after every query, or the mask hides them."""
    keys = k.shape[2]
    more = -keys % TILE_KEYS if keys > WHOLE_TILES_FROM else 0
    if more == 0:
        return k, v, mask
    if mask is not None:
        mask = F.pad(mask, (0, more), value=float("-inf"))
    elif not is_causal:
        mask = k.new_zeros(1, 1, 1, keys + more)
        mask[..., keys:] = float("-inf")
    return F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)), mask


def _partial_by_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
    softcap: float | None,
) -> Partial:
    """Two matrix products in fp32: runs on any device and knows softcap."""
    batch, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    folded = q.float().reshape(batch, kv_heads, group * queries, head_dim)
    scores = (folded @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, heads, queries, keys)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp().view(batch, kv_heads, group * queries, keys)
    output = (weights @ v.float()).view(batch, heads, queries, head_dim)
    return output.to(q.dtype), lse


def with_new_token(
    before: Partial,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """``before``, of ``q`` [B, heads, head_dim] over some keys, made attention over one more: ``k``, ``v``
    [B, kv_heads, head_dim]. That key's share is σ(score − lse)."""
    output, lse = before
    batch, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = batch, kv_heads, heads // kv_heads
    scores = (q.view(*grouped, head_dim).float() @ k.float().unsqueeze(-1)).squeeze(-1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    share = torch.sigmoid(scores - lse.view(grouped)).unsqueeze(-1)
    merged = torch.lerp(output.view(*grouped, head_dim).float(), v.float().unsqueeze(2), share)
    return merged.reshape(batch, heads, head_dim).to(q.dtype)


def merge_two(first: Partial, second: Partial) -> Partial:
    """Both over the same queries. A partial over no keys has lse −inf and weighs nothing."""
    (o1, lse1), (o2, lse2) = first, second
    share = torch.sigmoid(lse2 - lse1).unsqueeze(-1)
    share = torch.where(torch.isneginf(lse1).unsqueeze(-1), 1.0, share)
    merged = torch.lerp(o1.float(), o2.float(), share)
    return merged.to(o1.dtype), torch.logaddexp(lse1, lse2)


def merge_partials(outputs: torch.Tensor, lses: torch.Tensor, dim: int) -> Partial:
    """Merges along ``dim`` of ``outputs`` [..., head_dim] and ``lses`` (the same shape without the last).

    Entries with lse −inf weigh nothing; at least one along ``dim`` must be finite.
    """
    weights = lses.softmax(dim=dim)
    merged = (outputs.float() * weights.unsqueeze(-1)).sum(dim=dim)
    return merged.to(outputs.dtype), lses.logsumexp(dim=dim)
