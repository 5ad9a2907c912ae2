"""Attention that begins when Q is there, with torch's kernels, against the definition in float64."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec

HEAD_DIM = 16
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bf16: three roundings, of a part, the other part and the merge, each of 2⁻⁹ of values up to 4."""


@dataclass(frozen=True, slots=True)
class Batch:
    """``parts``: each sequence's tokens before the step and new ones."""

    seed: int
    block_size: int
    heads: tuple[int, int]
    window: int | None
    softcap: float | None
    dtype: torch.dtype
    parts: list[tuple[int, int]]


batches = st.builds(
    Batch,
    st.integers(0, 999),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([(1, 1), (6, 2), (4, 4)]),
    st.sampled_from([None, 1, 2, 7, 40]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(
        st.tuples(st.one_of(st.just(0), st.integers(1, 150)), st.one_of(st.just(1), st.integers(2, 60))),
        min_size=1,
        max_size=4,
    ),
)


@pytest.fixture(autouse=True)
def torch_kernels() -> None:
    kernels.use(None)


def defined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, batch: Batch) -> torch.Tensor:
    """``q`` [new, heads, head_dim], ``k``, ``v`` [all, kv_heads, head_dim] → [new, heads, head_dim]."""
    group = batch.heads[0] // batch.heads[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.25
    if batch.softcap is not None:
        scores = batch.softcap * torch.tanh(scores / batch.softcap)
    queries, keys = torch.arange(start, len(k))[:, None], torch.arange(len(k))[None, :]
    hidden = keys > queries
    if batch.window is not None:
        hidden |= keys <= queries - batch.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@settings(deadline=None, max_examples=80)
@given(batches)
def test_cached_tokens_are_attended_to_before_k_and_v_come(batch: Batch) -> None:
    """What the pool held is wiped as soon as Q was sent: none of it may be read after."""
    generator = torch.Generator().manual_seed(batch.seed)
    heads, kv_heads = batch.heads
    layout = KVLayout(1, kv_heads, HEAD_DIM, batch.block_size, batch.dtype.itemsize)
    counts = [blocks_for(before + new, batch.block_size) for before, new in batch.parts]
    blocks = list(range(sum(counts) + 2))
    random.Random(batch.seed).shuffle(blocks)
    pool = KVPool(layout, len(blocks), batch.dtype, CPU)
    chunks, cached = [], []
    for (before, new), count in zip(batch.parts, counts, strict=True):
        table = [blocks.pop() for _ in range(count)]
        chunks.append(SequenceChunk(table, before, new))
        kv = torch.randn(2, before, kv_heads, HEAD_DIM, generator=generator).to(batch.dtype)
        for position in range(before):
            block, place = table[position // batch.block_size], position % batch.block_size
            pool.keys[0][block, :, place], pool.values[0][block, :, place] = kv[:, position]
        cached.append(kv)
    tokens = sum(new for _, new in batch.parts)
    q = torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(batch.dtype)
    k, v = torch.randn(2, tokens, kv_heads, HEAD_DIM, generator=generator).to(batch.dtype)
    attention = LocalAttention(
        pool, [AttentionSpec(heads, kv_heads, HEAD_DIM, 0.25, batch.window, batch.softcap)]
    )
    attention.begin(chunks)
    attention.send_q(0, q)
    pool.tensor.zero_()
    attention.send_kv(0, k, v)
    output = attention.receive(0)
    assert output.is_contiguous()
    assert output.dtype is batch.dtype
    row = 0
    for chunk, kv in zip(chunks, cached, strict=True):
        own = slice(row, row + chunk.length)
        expected = defined(q[own], torch.cat([kv[0], k[own]]), torch.cat([kv[1], v[own]]), chunk.start, batch)
        tolerance = TOLERANCE[batch.dtype]
        torch.testing.assert_close(output[own].double(), expected, atol=tolerance, rtol=tolerance)
        row += chunk.length
