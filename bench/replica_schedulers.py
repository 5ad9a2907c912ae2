"""Vidur's five replica schedulers on one device, over the same requests, by the decisions that run live.

One instance of LLaMA-2-7B on an A100 by the roofline computes prompts and decodes. Lengths are a trace's, in
Poisson's arrivals at each rate, and known in advance where a scheduler asks for them.

    python bench/replica_schedulers.py TRACE [--rate 1 --rate 2] [--requests N]
"""

import argparse
from pathlib import Path
from typing import Any

from common.latency import REPORTED_PERCENTILES
from services.bench.traces import Trace, read_trace
from services.simulator.config import simulated_from_tree
from services.simulator.metrics import Metrics, measure
from services.simulator.run import Load, offered_of, simulate

PASS_TOKENS = 4096
SCHEDULERS: dict[str, dict[str, Any]] = {
    "FasterTransformer": {"mixed_policy": "static", "chunk_tokens": PASS_TOKENS},
    "Orca+": {"mixed_policy": "orca", "chunk_tokens": PASS_TOKENS},
    "vLLM": {"mixed_policy": "prefill_first", "chunk_tokens": PASS_TOKENS, "prefill_batching": "saturation"},
    "Sarathi": {"mixed_policy": "chunked", "chunk_tokens": 512},
    "LightLLM": {
        "mixed_policy": "prefill_first",
        "chunk_tokens": PASS_TOKENS,
        "prefill_batching": "saturation",
        "decode_admission": "reserve_peak",
    },
    "Orca+, admitted as by LightLLM": {
        "mixed_policy": "orca",
        "chunk_tokens": PASS_TOKENS,
        "decode_admission": "reserve_peak",
    },
}
SHARED: dict[str, Any] = {
    "block_size": 16,
    "max_decode_batch": 128,
    "scheduling_window": 128,
    "mixed_max_wait_s": 3600.0,
    "max_waiting_requests": 100_000,
    "swap_bytes": 0,
}
HEADINGS = "served/s, TTFT P50 and P99 (s), TPOT (ms), gap P99 (ms), sequences in a step, preempted"


def run(settings: dict[str, Any], trace: Trace, rate_per_s: float) -> Metrics:
    tree = {
        "cluster": {"model": "llama2-7b", "hop_s": 0.0},
        "instance": {**SHARED, **settings},
        "scheduler": {
            "max_pending_prefill_tokens": 1_000_000_000,
            "max_prefill_wait_s": 1e9,
            "max_requests_per_decode": 100_000,
        },
        "predictor": {"kind": "oracle", "lengths_file": "of the trace"},
        "pool": [
            {
                "name": "mixed",
                "role": "mixed",
                "count": 1,
                "device": "a100-sxm",
                "performance": {"kind": "roofline"},
            }
        ],
    }
    offered = list(offered_of(trace, rate_per_s, "poisson", seed=1))
    return measure(simulate(simulated_from_tree(tree), Load(offered)))


def row(name: str, metrics: Metrics) -> str:
    ttft, tpot = metrics.ttft, metrics.tpot
    assert ttft is not None, "nobody was served"
    assert tpot is not None, "nobody drew a second token"
    gap_s = metrics.tbt_s[REPORTED_PERCENTILES.index(99.0)]
    [pool] = metrics.pools
    cells = (
        f"{metrics.requests_per_s:.2f}",
        f"{ttft.p50_s:.3g}, {ttft.p99_s:.3g}",
        f"{1e3 * tpot.mean_s:.0f}",
        f"{1e3 * gap_s:.0f}",
        f"{pool.batch:.0f}",
        f"{pool.preempted}",
    )
    return " | ".join(("", name, *cells, "")).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", type=float, action="append", help="requests a second")
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, arguments.requests)
    for rate_per_s in arguments.rate or [2.0, 4.0, 6.0]:
        print(f"at {rate_per_s:g} a second: {HEADINGS}")
        for name, settings in SCHEDULERS.items():
            print(row(name, run(settings, trace, rate_per_s)), flush=True)


if __name__ == "__main__":
    main()
