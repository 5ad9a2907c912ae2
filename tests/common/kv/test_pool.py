import mmap

import pytest
import torch

from common.kv.layout import KVLayout
from common.kv.pool import KVPool

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=8, element_bytes=4)
CPU = torch.device("cpu")


def test_views_share_the_buffer_and_start_as_zeros() -> None:
    memory = mmap.mmap(-1, LAYOUT.pool_bytes(5))
    pool = KVPool(LAYOUT, 5, torch.float32, CPU, memoryview(memory))
    assert pool.keys[0].shape == (5, 3, 8, 4)
    assert pool.nbytes == len(memory) == pool.tensor.numel()
    assert int(pool.tensor.count_nonzero()) == 0
    pool.values[1][4, 2, 7, 3] = 1.5
    assert memoryview(memory).cast("f")[-1] == 1.5


def test_runs_of_the_layout_copy_a_sequence_between_pools() -> None:
    source = KVPool(LAYOUT, 4, torch.float32, CPU)
    destination = KVPool(LAYOUT, 6, torch.float32, CPU)
    source.tensor.view(torch.float32).normal_()
    for s, d, length in LAYOUT.paired_runs([3, 0], [1, 5], range(11), 4, 6, range(2)):
        destination.tensor[d : d + length] = source.tensor[s : s + length]
    for layer in range(2):
        for ours, theirs in ((source.keys, destination.keys), (source.values, destination.values)):
            assert torch.equal(ours[layer][3], theirs[layer][1])
            assert torch.equal(ours[layer][0, :, :3], theirs[layer][5, :, :3])
            assert int(theirs[layer][5, :, 3:].count_nonzero()) == 0


def test_a_buffer_or_dtype_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="must be writable and hold"):
        KVPool(LAYOUT, 5, torch.float32, CPU, memoryview(bytearray(LAYOUT.pool_bytes(4))))
    with pytest.raises(ValueError, match="must be writable and hold"):
        KVPool(LAYOUT, 1, torch.float32, CPU, memoryview(bytes(LAYOUT.pool_bytes(1))))
    with pytest.raises(ValueError, match="dtype"):
        KVPool(LAYOUT, 5, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="total_blocks = 0"):
        KVPool(LAYOUT, 0, torch.float32, CPU)
