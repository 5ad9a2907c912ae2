"""Blocks that go to the host tier and come back into others."""

import pytest
import torch

from common.kv.host_memory import HostMemory
from common.kv.layout import KVLayout
from common.kv.pool import KVPool

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, block_size=2, element_bytes=2)
BLOCKS = 6


def filled_pool() -> KVPool:
    pool = KVPool(LAYOUT, BLOCKS, torch.bfloat16, torch.device("cpu"))
    for layer in range(LAYOUT.layers):
        pool.keys[layer].copy_(torch.randn(pool.keys[layer].shape))
        pool.values[layer].copy_(torch.randn(pool.values[layer].shape))
    return pool


@pytest.mark.parametrize(
    ("blocks", "back"),
    [((0, 1, 2), (3, 4, 5)), ((5, 0, 3), (1, 2, 4)), ((4,), (4,))],
    ids=["adjacent", "scattered", "one"],
)
def test_what_comes_back_is_what_was_there_in_every_layer_and_nothing_else_changes(
    blocks: tuple[int, ...], back: tuple[int, ...]
) -> None:
    pool = filled_pool()
    tier = HostMemory(pool, 4)
    host_blocks = (3, 0, 1)[: len(blocks)]
    before = [plane.clone() for plane in (*pool.keys, *pool.values)]
    assert tier.copy_out(blocks, host_blocks) == len(blocks) * LAYOUT.block_bytes
    for plane in (*pool.keys, *pool.values):
        plane[list(blocks)] = 0
    assert tier.copy_in(back, host_blocks) == len(blocks) * LAYOUT.block_bytes
    untouched = [block for block in range(BLOCKS) if block not in {*blocks, *back}]
    for plane, old in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(plane[list(back)], old[list(blocks)])
        assert torch.equal(plane[untouched], old[untouched])


def test_a_tier_of_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="total_blocks = 0"):
        HostMemory(filled_pool(), 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_s_blocks_wait_in_page_locked_memory() -> None:
    pool = KVPool(LAYOUT, BLOCKS, torch.bfloat16, torch.device("cuda"))
    pool.keys[1].copy_(torch.randn(pool.keys[1].shape))
    old = pool.keys[1].clone()
    tier = HostMemory(pool, 4)
    tier.copy_out((1, 2, 5), (0, 1, 2))
    pool.keys[1].zero_()
    tier.copy_in((3, 4, 0), (0, 1, 2))
    assert torch.equal(pool.keys[1][[3, 4, 0]], old[[1, 2, 5]])
