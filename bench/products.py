"""How long products of fp32 rows with weights of a form take by the compiled kernels and by oneDNN.

    python bench/products.py [--weights bf16|model] [--threads 1] [--rounds 5]

Both in turn, of one layer's shape after the other; prints medians and their ratio. oneDNN multiplies by an
fp32 copy of the same rounded weights, or by fp32 weights as they are ("model"). The compiled kernels take all
rows here, also where a model leaves many to oneDNN: that is how to find out whether it should.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch

from common.model import kernels
from common.model.cpu import panels
from common.model.linears import Linear, linear_of

SHAPES = ((1536, 576), (2048, 2048), (4096, 4096), (2048, 8192), (4096, 14336))
"""Outputs and inputs."""
ROWS = (1, 4, 8, 16, 64, 256, 1024)
MOST_PRODUCTS = 45_000_000_000
CACHE = Path("~/.cache/lamella")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", choices=("bf16", "model"), default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    panels.quick_rows = _all_rows
    for outs, ins in SHAPES:
        weight = torch.randn(outs, ins)
        kernels.use(None)
        read = weight if options.weights == "model" else weight.bfloat16().float()
        by_torch = linear_of(read, None, "model")
        kernels.use_compiled(CACHE, threads=1)
        compiled = linear_of(weight, None, options.weights)
        for rows in ROWS:
            if rows * outs * ins > MOST_PRODUCTS:
                continue
            x = torch.randn(1, rows, ins)
            times_s = [(_time_s(by_torch, x), _time_s(compiled, x)) for _ in range(options.rounds)]
            before_s, now_s = (statistics.median(each) for each in zip(*times_s, strict=True))
            rate = 2 * rows * outs * ins / now_s / 1e9
            print(
                f"{outs} x {ins}, {rows} rows: oneDNN {1e3 * before_s:.2f} ms, compiled {1e3 * now_s:.2f} ms,"
                f" ratio {now_s / before_s:.2f}, {rate:.0f} GFLOPS"
            )


def _all_rows(weight_bytes: int, threads: int, lanes: int = panels.LANES) -> float:
    return math.inf


def _time_s(linear: Linear, x: torch.Tensor) -> float:
    started_s = time.perf_counter()
    linear(x)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
