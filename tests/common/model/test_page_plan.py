import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.page_plan import DecodeRow, plan_decode
from common.spec import AttentionSpec

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, list[DecodeRow], int | None]:
    """(block size, total blocks, rows, window); tables dense, scattered, or sharing a prefix."""
    block_size = draw(st.sampled_from([1, 3, 16, 64, 128]))
    tokens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    counts = [-(-count // block_size) for count in tokens]
    spare = draw(st.integers(0, 6))
    total = sum(counts) + spare
    blocks = list(range(total))
    if draw(st.booleans()):
        blocks = draw(st.randoms(use_true_random=False)).sample(blocks, total)
    tables = []
    for count in counts:
        tables.append(blocks[:count])
        blocks = blocks[count:]
    if draw(st.booleans()):
        shared = draw(st.integers(0, min(counts)))
        tables = [tables[0][:shared] + table[shared:] for table in tables]
    rows = [DecodeRow(i, table, count) for i, (table, count) in enumerate(zip(tables, tokens, strict=True))]
    return block_size, total, rows, draw(st.sampled_from([None, 1, 7, 200]))


@settings(deadline=None, max_examples=60)
@given(batches(), st.sampled_from([None, 2.0]))
def test_every_plan_computes_the_definition(
    batch: tuple[int, int, list[DecodeRow], int | None], softcap: float | None
) -> None:
    block_size, total, rows, window = batch
    layout = KVLayout(layers=1, kv_heads=2, head_dim=16, block_size=block_size, element_bytes=4)
    pool = KVPool(layout, total, torch.float32, CPU)
    generator = torch.Generator().manual_seed(total)
    pool.tensor.view(torch.float32).normal_(generator=generator)
    q = torch.randn(len(rows), 6, 16, generator=generator)
    spec = AttentionSpec(6, 2, 16, 0.25, window, softcap)
    plan = plan_decode(rows, layout, window, torch.float32, CPU)
    output, lse = plan.attend(q, pool.keys[0], pool.values[0], spec)
    for row in rows:
        first = 0 if window is None else max(0, row.tokens - window)
        places = [(row.block_table[t // block_size], t % block_size) for t in range(first, row.tokens)]
        k, v = (
            torch.stack([pages[block, :, slot] for block, slot in places], dim=1).repeat_interleave(3, 0)
            for pages in (pool.keys[0], pool.values[0])
        )
        scores = torch.einsum("hd,hkd->hk", q[row.row], k) * 0.25
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("hk,hkd->hd", scores.softmax(-1), v)
        torch.testing.assert_close(output[row.row], expected, atol=2e-5, rtol=0.0)
        torch.testing.assert_close(lse[row.row], scores.logsumexp(-1), atol=2e-5, rtol=0.0)


def test_dense_pages_are_read_as_they_lie() -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=16, block_size=64, element_bytes=4)
    rows = [DecodeRow(0, [2, 4], 100), DecodeRow(1, [3], 64)]
    plan = plan_decode(rows, layout, None, torch.float32, CPU)
    (call,) = plan.calls
    assert (call.first, call.stop, call.keys, call.gathered) == (2, 5, 64, None)


def test_one_full_page_each_needs_neither_mask_nor_merge() -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=16, block_size=64, element_bytes=4)
    plan = plan_decode([DecodeRow(0, [0], 50), DecodeRow(1, [1], 50)], layout, None, torch.float32, CPU)
    assert plan.calls[0].mask is None
    assert plan.merge_index is None
