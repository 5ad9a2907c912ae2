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
POINTS = 2.001
GPUS = {"vllm": 1, "vllm_tp2": 2, "p1d1": 2, "p2d1": 3}
STEP_TOKENS = 50_000
"""Of contexts that one decode step takes there (`[instance] max_step_context_tokens`)."""

Row = tuple[str, float, str]
"""(workload, requests a second for each GPU, configuration)"""

ROWS: dict[Row, tuple[float, float, float]] = {
    ("B", 0.5, "vllm"): (73.1, 100.0, 73.1),
    ("B", 0.5, "vllm_tp2"): (89.2, 100.0, 89.2),
    ("B", 0.5, "p1d1"): (91.7, 100.0, 91.7),
    ("B", 0.5, "p2d1"): (99.4, 100.0, 99.4),
    ("B", 1.0, "vllm"): (69.3, 99.9, 69.2),
    ("B", 1.0, "vllm_tp2"): (85.2, 99.9, 85.1),
    ("B", 1.0, "p1d1"): (88.6, 100.0, 88.6),
    ("B", 1.0, "p2d1"): (98.1, 100.0, 98.1),
    ("B", 1.5, "vllm"): (64.1, 99.7, 63.8),
    ("B", 1.5, "vllm_tp2"): (79.0, 99.7, 78.7),
    ("B", 1.5, "p1d1"): (82.8, 100.0, 82.8),
    ("B", 1.5, "p2d1"): (94.4, 100.0, 94.4),
    ("A", 1.0, "vllm"): (97.0, 100.0, 97.0),
    ("A", 1.0, "vllm_tp2"): (99.0, 100.0, 99.0),
    ("A", 1.0, "p1d1"): (99.6, 100.0, 99.6),
    ("A", 1.0, "p2d1"): (100.0, 100.0, 100.0),
    ("A", 3.0, "vllm"): (95.9, 100.0, 95.9),
    ("A", 3.0, "vllm_tp2"): (97.4, 50.3, 49.8),
    ("A", 3.0, "p1d1"): (98.5, 100.0, 98.5),
    ("A", 3.0, "p2d1"): (100.0, 43.4, 43.4),
}
TTFT, TPOT = 0, 1
BY_ITS_RULES: dict[Row, tuple[int, float]] = {
    ("B", 1.5, "vllm"): (TTFT, 65.9),
    ("B", 1.5, "vllm_tp2"): (TTFT, 78.3),
    ("A", 3.0, "vllm_tp2"): (TPOT, 51.7),
}
"""Per cent within it by its rules written down anew, where they give its own row least well: of a thousand
requests the least change of a pass turns ten."""

Stages = tuple[int, int]
"""Of the prefill and of the decode instance."""
IN_STAGES: dict[tuple[str, float, Stages], tuple[float, tuple[float, float, float]]] = {
    ("B", 1.0, (2, 1)): (90.1, (36.7, 36.9, 41.9)),
    ("B", 1.5, (2, 1)): (88.1, (51.9, 53.3, 60.0)),
    ("B", 1.0, (1, 2)): (82.8, (31.4, 31.4, 34.2)),
    ("B", 1.0, (2, 2)): (88.6, (34.3, 34.8, 37.2)),
    ("A", 3.0, (2, 2)): (98.8, (53.5, 55.8, 63.4)),
}
"""It printed no row of a pipeline: by its rules written down anew, which give its rows of p1d1 and p2d1
within a tenth of a point. Per cent within TTFT, and TPOT in ms: mean, p50, p90."""

TTFT_MS = {"p1d1": (119.6, 106.9, 207.1, 330.3), "p2d1": (82.6, 74.6, 138.5, 220.5)}
TPOT_MS = {"p1d1": (30.5, 30.5, 34.1, 37.0), "p2d1": (36.7, 36.8, 41.9, 45.5)}
"""Of workload B at 1.0: mean, p50, p90, p99."""
VLLM_TTFT_MS = (165.1, 148.2, 281.3, 426.7)
VLLM_TPOT_MS = (36.1, 35.3, 42.3, 58.9)


@cache
def simulated_row(
    shared_directory: Path, row: Row, stages: Stages = (1, 1), most: int | None = STEP_TOKENS
) -> Metrics:
    """``most``: tokens of context in a step."""
    workload, rate_per_gpu, name = row
    data = shared_directory / "data/distserve"
    tree = tomllib.loads((BENCH / f"distserve_{name}.toml").read_text())
    assert tree["instance"].pop("max_step_context_tokens") == STEP_TOKENS
    if most is not None:
        tree["instance"]["max_step_context_tokens"] = most
    for pool, its_stages in zip(tree["pool"], stages, strict=False):
        pool["performance"]["path"] = str(data / Path(pool["performance"]["path"]).name)
        pool["pipeline"] = its_stages
    rate_per_s = (GPUS[name] if stages == (1, 1) else sum(stages)) * rate_per_gpu
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


@pytest.mark.parametrize("row", BY_ITS_RULES)
def test_where_its_rules_give_another_row_theirs_comes_out(shared_directory: Path, row: Row) -> None:
    of, share = BY_ITS_RULES[row]
    assert attained(simulated_row(shared_directory, row))[of] == pytest.approx(share, abs=0.5)


@pytest.mark.parametrize("name", ["p1d1", "p2d1"])
def test_disaggregated_latencies_come_out(shared_directory: Path, name: str) -> None:
    metrics = simulated_row(shared_directory, ("B", 1.0, name))
    # A prompt waits for nothing but prompts: the same to the last digit that it prints.
    assert spread_ms(metrics.ttft) == pytest.approx(TTFT_MS[name], abs=0.051)
    assert spread_ms(metrics.tpot) == pytest.approx(TPOT_MS[name], rel=0.02)


def test_a_mixed_instance_s_latencies_come_out(shared_directory: Path) -> None:
    metrics = simulated_row(shared_directory, ("B", 1.0, "vllm"))
    assert spread_ms(metrics.ttft) == pytest.approx(VLLM_TTFT_MS, rel=0.01)
    assert spread_ms(metrics.tpot) == pytest.approx(VLLM_TPOT_MS, rel=0.004)


def test_without_its_bound_of_a_step_an_overloaded_decode_instance_is_another_one(
    shared_directory: Path,
) -> None:
    """Its rules written down anew give 50.8 then; with it the row comes out."""
    row = ("A", 3.0, "p2d1")
    bounded, metrics = simulated_row(shared_directory, row), simulated_row(shared_directory, row, most=None)
    for each in (bounded, metrics):
        assert most_context_tokens(each) > 1.8 * STEP_TOKENS
    assert attained(metrics) == pytest.approx((100.0, 50.8, 50.8), abs=0.5)


@pytest.mark.parametrize("row", IN_STAGES)
def test_pipelines_attain_what_its_rules_say(shared_directory: Path, row: tuple[str, float, Stages]) -> None:
    workload, rate_per_gpu, stages = row
    metrics = simulated_row(shared_directory, (workload, rate_per_gpu, "p1d1"), stages)
    its_ttft, its_tpot_ms = IN_STAGES[row]
    assert attained(metrics) == pytest.approx((its_ttft, 100.0, its_ttft), abs=POINTS)
    assert spread_ms(metrics.tpot)[:3] == pytest.approx(its_tpot_ms, rel=0.02)
