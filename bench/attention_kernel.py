"""Decode attention on this CPU as a share of its memory bandwidth: bytes of KV read a second, one layer.

The default model's heads (9 query, 3 KV, of 64), fp32, blocks of 256 in random order, sequences of 0.5 to
1.5 times the context. Compiled and torch's kernels in turn, and a plain sum over 256 MiB as the measure.

    python bench/attention_kernel.py [--threads 1] [--rounds 9]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.interface import SequenceChunk
from common.spec import AttentionSpec

SPEC = AttentionSpec(9, 3, 64, 64**-0.5)
LAYOUT = KVLayout(layers=1, kv_heads=3, head_dim=64, block_size=256, element_bytes=4)
CASES = ((8, 512), (32, 512), (8, 4096), (32, 4096))
STREAMED = torch.ones(64 << 20)


def chunks_of(batch: int, context: int) -> list[SequenceChunk]:
    chance = random.Random(batch * context)
    lengths = [chance.randint(context // 2, 3 * context // 2) for _ in range(batch)]
    blocks = list(range(sum(blocks_for(length + 1, LAYOUT.block_size) for length in lengths)))
    chance.shuffle(blocks)
    chunks = []
    for length in lengths:
        count = blocks_for(length + 1, LAYOUT.block_size)
        chunks.append(SequenceChunk(tuple(blocks[:count]), length, 1))
        del blocks[:count]
    return chunks


def step_of(chunks: list[SequenceChunk]) -> Callable[[], None]:
    """One layer of one step."""
    total_blocks = sum(len(chunk.block_table) for chunk in chunks)
    pool = KVPool(LAYOUT, total_blocks, torch.float32, torch.device("cpu"))
    pool.tensor.view(torch.float32).normal_()
    attention = LocalAttention(pool, (SPEC,))
    q, k, v = (torch.randn(len(chunks), heads, 64) for heads in (9, 3, 3))
    attention.begin(chunks)

    def step() -> None:
        attention.send_q(0, q)
        attention.send_kv(0, k, v)
        attention.receive(0)

    return step


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads; GB/s of KV, median of {options.rounds}; share of a plain sum's")
    for batch, context in CASES:
        chunks = chunks_of(batch, context)
        nbytes = sum(chunk.start for chunk in chunks) * LAYOUT.token_layer_bytes
        kernels.use(None)
        with torch.inference_mode():
            by_torch = step_of(chunks)
            kernels.use_compiled(Path("~/.cache/lamella"))
            compiled = step_of(chunks)
            work: dict[str, Callable[[], object]] = {
                "sum": STREAMED.sum,
                "torch": by_torch,
                "compiled": compiled,
            }
            taken: dict[str, list[float]] = {name: [] for name in work}
            for _ in range(options.rounds):
                for name, step in work.items():
                    taken[name].append(seconds(step))
        speed = {name: nbytes / statistics.median(each) / 1e9 for name, each in taken.items()}
        speed["sum"] = STREAMED.nbytes / statistics.median(taken["sum"]) / 1e9
        shares = "  ".join(
            f"{name} {speed[name]:5.1f} ({speed[name] / speed['sum']:.0%})" for name in ("torch", "compiled")
        )
        print(f"{batch:2} x {context:4}: sum {speed['sum']:5.1f}  {shares}")


if __name__ == "__main__":
    main()
