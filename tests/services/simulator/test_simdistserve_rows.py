"""Attainment against what simdistserve prints: its own workloads, constants and assumptions as far as
settings go. Rows are its output for OPT-13B: per cent of 1,000 requests within TTFT 200 ms, TPOT 100
ms and both."""

import tomllib
from functools import cache
from pathlib import Path

import pytest

from common.latency import Distribution, ServiceObjectives
from services.bench.traces import read_trace
from services.simulator.config import simulated_from_tree
from services.simulator.metrics import Metrics, measure
from services.simulator.run import Load, Offered, simulate

BENCH = Path(__file__).resolve().parents[3] / "bench"
OBJECTIVES = ServiceObjectives(ttft_s=0.2, tpot_s=0.1)
POINTS = 2.0
GPUS = {"vllm": 1, "p1d1": 2, "p2d1": 3}
STEP_TOKENS = 50_000
"""Of contexts that one decode step takes there. Who comes after them waits for the next one, in turn."""

Row = tuple[str, float, str]
"""(workload, requests a second for each GPU, configuration)"""

ROWS: dict[Row, tuple[float, float, float]] = {
    ("B", 1.0, "vllm"): (69.3, 99.9, 69.2),
    ("B", 1.0, "p1d1"): (88.6, 100.0, 88.6),
    ("B", 1.0, "p2d1"): (98.1, 100.0, 98.1),
    ("B", 1.5, "vllm"): (64.1, 99.7, 63.8),
    ("B", 1.5, "p1d1"): (82.8, 100.0, 82.8),
    ("B", 1.5, "p2d1"): (94.4, 100.0, 94.4),
    ("A", 1.0, "vllm"): (97.0, 100.0, 97.0),
    ("A", 1.0, "p1d1"): (99.6, 100.0, 99.6),
    ("A", 1.0, "p2d1"): (100.0, 100.0, 100.0),
    ("A", 3.0, "vllm"): (95.9, 100.0, 95.9),
    ("A", 3.0, "p1d1"): (98.5, 100.0, 98.5),
}
OVERLOADED: Row = ("A", 3.0, "p2d1")
OVERLOADED_TPOT = 43.4

TTFT_MS = {"p1d1": (119.6, 106.9, 207.1, 330.3), "p2d1": (82.6, 74.6, 138.5, 220.5)}
TPOT_MS = {"p1d1": (30.5, 30.5, 34.1, 37.0), "p2d1": (36.7, 36.8, 41.9, 45.5)}
"""Of workload B at 1.0: mean, p50, p90, p99."""


@cache
def simulated_row(shared_directory: Path, row: Row) -> Metrics:
    workload, rate_per_gpu, name = row
    data = shared_directory / "data/distserve"
    tree = tomllib.loads((BENCH / f"distserve_{name}.toml").read_text())
    for pool in tree["pool"]:
        pool["performance"]["path"] = str(data / Path(pool["performance"]["path"]).name)
    rate_per_s = GPUS[name] * rate_per_gpu
    # Of an output it computes as many decode steps: the token that the prompt itself draws comes on top.
    requests = [
        Offered((each.arrival_s or 0.0) / rate_per_s, each.prompt_tokens, each.output_tokens + 1)
        for each in read_trace(data / f"workload_{workload}_n1000_seed0.csv.gz").requests
    ]
    return measure(simulate(simulated_from_tree(tree), Load(requests)), OBJECTIVES)


def attained(metrics: Metrics) -> tuple[float, float, float]:
    """Per cent, as in a row."""
    assert metrics.attainment is not None
    assert metrics.done == metrics.requests == 1000
    found = metrics.attainment
    return 100 * found.ttft_share, 100 * found.tpot_share, 100 * found.share


def most_context_tokens(metrics: Metrics) -> float:
    """That a decode instance held at once."""
    return metrics.pools[-1].kv_peak * 1_000_000


def spread_ms(found: Distribution | None) -> list[float]:
    assert found is not None
    return [1e3 * each for each in (found.mean_s, found.p50_s, found.p90_s, found.p99_s)]


@pytest.mark.parametrize("row", ROWS)
def test_its_attainment_comes_out(shared_directory: Path, row: Row) -> None:
    assert attained(simulated_row(shared_directory, row)) == pytest.approx(ROWS[row], abs=POINTS)


@pytest.mark.parametrize("name", ["p1d1", "p2d1"])
def test_disaggregated_latencies_come_out(shared_directory: Path, name: str) -> None:
    metrics = simulated_row(shared_directory, ("B", 1.0, name))
    # A prompt waits for nothing but prompts: the same to the last digit that it prints.
    assert spread_ms(metrics.ttft) == pytest.approx(TTFT_MS[name], abs=0.051)
    assert spread_ms(metrics.tpot) == pytest.approx(TPOT_MS[name], rel=0.02)


def test_an_overloaded_decode_instance_is_another_one_here(shared_directory: Path) -> None:
    """Its steps take 50,000 tokens of contexts at the most and go round; ours take everybody who is there. A
    known difference, not within two points: twice as many are there, in other rows hardly ever so many."""
    metrics = simulated_row(shared_directory, OVERLOADED)
    ttft, tpot, both = attained(metrics)
    assert most_context_tokens(metrics) > 2 * STEP_TOKENS
    assert ttft == 100.0
    assert tpot == both
    assert OVERLOADED_TPOT + POINTS < tpot < OVERLOADED_TPOT + 10
