"""The plan for CUDA devices: with the kernel itself where there is one, and its definition everywhere."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import attention, flash_plan
from common.model.attention import LocalAttention
from common.model.flash_plan import FlashPlan, flash_attention, has_flash
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec

HEAD_DIM = 16
CPU = torch.device("cpu")
SCALE = 0.25
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}
"""On the device in bf16."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

parts = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(1, 150)), st.one_of(st.just(1), st.integers(2, 60))),
    min_size=1,
    max_size=5,
)
windows = st.sampled_from([None, 1, 2, 7, 40])


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float = SCALE
) -> torch.Tensor:
    """The last queries of a sequence: ``q`` [new, heads, head_dim] over ``k``, ``v`` [all, kv_heads, ...]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    queries = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def as_the_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: FlashPlan, scale: float
) -> torch.Tensor:
    assert scale == SCALE
    queries, keys = plan.query_ends.tolist(), plan.key_ends.tolist()
    assert queries[-1] == len(q)
    assert keys[-1] == len(k) == len(v)
    found = []
    for (begin, end), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
        if plan.window is not None:
            assert last - first <= end - begin + plan.window - 1, "what no query sees is gathered"
        found.append(defined(q[begin:end], k[first:last], v[first:last], plan.window))
    assert plan.most_queries == max(map(len, found))
    assert plan.most_keys == max(end - begin for begin, end in pairwise(keys))
    return torch.cat(found).to(q.dtype)


def check(
    sequences: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    device: torch.device,
) -> None:
    """A step of a ragged batch in scattered blocks, against the definition."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = [blocks_for(before + new, block_size) for before, new in sequences]
    blocks = list(range(sum(counts) + 2))
    random.Random(sum(counts)).shuffle(blocks)
    pool = KVPool(KVLayout(1, heads[1], HEAD_DIM, block_size, dtype.itemsize), len(blocks), dtype, device)
    generator = torch.Generator().manual_seed(len(blocks))
    chunks, cached = [], []
    for (before, new), count in zip(sequences, counts, strict=True):
        # A block more than is needed yet, as the engine may have it.
        table = [blocks.pop() for _ in range(count)] + [0] * (new % 2)
        chunks.append(SequenceChunk(table, before, new))
        kv = torch.randn(2, before, heads[1], HEAD_DIM, generator=generator).to(device, dtype)
        for position in range(before):
            block, place = table[position // block_size], position % block_size
            pool.keys[0][block, :, place], pool.values[0][block, :, place] = kv[:, position]
        cached.append(kv)
    tokens = sum(new for _, new in sequences)
    q = torch.randn(tokens, heads[0], HEAD_DIM, generator=generator).to(device, dtype)
    k, v = torch.randn(2, tokens, heads[1], HEAD_DIM, generator=generator).to(device, dtype)
    local = LocalAttention(pool, [AttentionSpec(*heads, HEAD_DIM, SCALE, window, None)])
    local.begin(chunks)
    local.send_q(0, q)
    local.send_kv(0, k, v)
    output = local.receive(0)
    assert output.is_contiguous()
    assert output.dtype is dtype
    row = 0
    for chunk, kv in zip(chunks, cached, strict=True):
        own = slice(row, row + chunk.length)
        expected = defined(q[own], torch.cat([kv[0], k[own]]), torch.cat([kv[1], v[own]]), window)
        tolerance = TOLERANCE[device.type]
        torch.testing.assert_close(output[own].double(), expected, atol=tolerance, rtol=tolerance)
        row += chunk.length


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts, st.sampled_from([1, 16, 64]), st.sampled_from([(1, 1), (6, 2), (4, 4)]), windows)
def test_the_kernel_is_told_of_each_sequence_s_tokens_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
    sequences: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
) -> None:
    monkeypatch.setattr(attention, "has_flash", lambda pool, has_softcap: True)
    monkeypatch.setattr(flash_plan, "flash_attention", as_the_kernel)
    check(sequences, block_size, heads, window, CPU)


@needs_cuda
@settings(max_examples=60)
@given(parts, st.sampled_from([1, 16, 64]), st.sampled_from([(1, 1), (6, 2), (4, 4)]), windows)
def test_the_kernel_computes_the_definition(
    sequences: list[tuple[int, int]], block_size: int, heads: tuple[int, int], window: int | None
) -> None:
    check(sequences, block_size, heads, window, torch.device("cuda"))


def test_torch_s_kernel_takes_what_it_is_given() -> None:
    """Its shapes alone, where nothing computes."""
    meta = torch.device("meta")
    q, k = torch.empty(7, 6, 64, device=meta), torch.empty(20, 2, 64, device=meta)
    ends = torch.empty(3, dtype=torch.int32, device=meta)
    for window in (None, 5):
        plan = FlashPlan(torch.empty(0), ends, ends, 4, 12, window)
        assert flash_attention(q, k, k, plan, SCALE).shape == q.shape


@pytest.mark.parametrize(
    ("change", "has_softcap", "expected"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"dtype": torch.float32}, False, False),
        ({"device": CPU}, False, False),
        ({"head_dim": 264}, False, False),
        ({"head_dim": 12}, False, False),
        ({"capability": (7, 5)}, False, False),
    ],
)
def test_what_the_kernel_does_not_take_goes_the_other_way(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], has_softcap: bool, expected: bool
) -> None:
    capability = change.get("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    pool = KVPool(KVLayout(1, 1, change.get("head_dim", 64), 4, 2), 1, torch.bfloat16, CPU)
    pool.device = change.get("device", torch.device("cuda"))
    pool.dtype = change.get("dtype", torch.bfloat16)
    assert has_flash(pool, has_softcap) is expected
