"""How long one forward pass takes, and where the time goes: linears, attention, the rest.

    python bench/model_step.py MODEL_DIRECTORY [--dtype float32] [--threads 1] [--weights model]
        [--kernels auto|torch]

Prints, for decode batches and prefill chunks, the median time of a pass and the profiler's shares. Run it
with the environment the launcher gives its instances (services/launcher/launch_plan.py) to see what they see.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import get_args

import torch
from torch.profiler import ProfilerActivity, profile

from common.config import Kernels
from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SamplingParams
from common.model.attention import LocalAttention
from common.model.kernels import use_compiled
from common.model.precision import WeightForm
from common.model.program import TORCH_DTYPES, load_program
from common.model.runner import ModelRunner
from common.steps import Draw, SequenceStep

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
KINDS = {
    "linears": ("linear", "addmm", "mm", "matmul", "bmm", "int8", "dynamic"),
    "attention": ("attention", "flash"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", choices=get_args(WeightForm), default="model")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runner, capacity = _load(options)
    print(f"{options.model.name} {options.dtype} weights={options.weights} threads={options.threads}")
    for batch in (1, 2, 4, 8, 16, 32):
        _report(f"decode, batch {batch}", _decode(batch, options), runner, options.rounds)
    for tokens in (16, 64, 256, 1024):
        if tokens <= capacity:
            _report(
                f"prefill, {tokens} tokens", _prefill(tokens, options), runner, max(3, options.rounds // 3)
            )


def _load(options: argparse.Namespace) -> tuple[ModelRunner, int]:
    dtype = TORCH_DTYPES[options.dtype]
    device = torch.device("cpu")
    cache = Path("~/.cache/lamella").expanduser()
    if options.kernels == "auto":
        use_compiled(cache, options.threads)
    program = load_program(options.model, options.dtype, device, cache, weights=options.weights)
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, options.block_size, dtype.itemsize)
    total_blocks = 40 * blocks_for(max(1024, options.context + 1), options.block_size)
    pool = KVPool(layout, total_blocks, dtype, device)
    runner = ModelRunner(program, LocalAttention(pool, program.attention_specs))
    return runner, total_blocks * options.block_size


def _decode(batch: int, options: argparse.Namespace) -> list[SequenceStep]:
    blocks = blocks_for(options.context + 1, options.block_size)
    return [
        SequenceStep(
            (17,),
            options.context,
            tuple(range(row * blocks, (row + 1) * blocks)),
            Draw(GREEDY, (1,) * options.context, (17,)),
        )
        for row in range(batch)
    ]


def _prefill(tokens: int, options: argparse.Namespace) -> list[SequenceStep]:
    prompt = tuple(range(100, 100 + tokens))
    return [
        SequenceStep(
            prompt, 0, tuple(range(blocks_for(tokens, options.block_size))), Draw(GREEDY, prompt, ())
        )
    ]


def _report(name: str, batch: list[SequenceStep], runner: ModelRunner, rounds: int) -> None:
    times_s = []
    for _ in range(rounds + 2):
        started_s = time.perf_counter()
        runner.run(batch)
        times_s.append(time.perf_counter() - started_s)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        runner.run(batch)
    shares = dict.fromkeys(KINDS, 0.0)
    total_us = 0.0
    for event in profiled.key_averages():
        total_us += event.self_cpu_time_total
        for kind, words in KINDS.items():
            if any(word in event.key for word in words):
                shares[kind] += event.self_cpu_time_total
                break
    parts = ", ".join(f"{kind} {share / total_us:.0%}" for kind, share in shares.items())
    median_ms = statistics.median(times_s[2:]) * 1e3
    print(f"  {name:24} {median_ms:8.1f} ms   min {min(times_s[2:]) * 1e3:7.1f}   ({parts} of operator time)")


if __name__ == "__main__":
    main()
