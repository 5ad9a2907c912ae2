"""Whole traces against what Vidur makes of them: its very requests, estimators trained from its profiles, and
its assumptions. The figures are its output, seconds: mean, median, 90th and 99th percentile."""

import csv
import gzip
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from services.bench.traces import read_trace
from services.simulator.config import simulated_from_tree
from services.simulator.metrics import Metrics, measure
from services.simulator.run import Load, offered_of, simulate
from tests.services.simulator.performance.conftest import write_csv

BENCH = Path(__file__).resolve().parents[3] / "bench"
A100 = "data/vidur/profiling/compute/a100"
GROUPED_ATTENTION = f"{A100}/attention_tp2_embd8192_q64_kv8.csv.gz"
CONVERSATIONS = "splitwise_conv_poisson_qps1.0_n512_seed42.csv.gz"
FIXED = "default_fixed2048_512_poisson_qps0.5_n128_seed42.csv.gz"
MANY = "splitwise_conv_poisson_qps48_n6000_seed42.csv.gz"
TOLERANCE = 0.05
Spread = tuple[float, float, float, float]
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """``gaps``: between tokens, median, 90th and 99th percentile; ``last_end_s``: since the first arrival."""

    requests: int
    ttft: Spread
    tpot: Spread
    end_to_end: Spread
    gaps: tuple[float, float, float]
    slowest_gap_s: float
    last_end_s: float


SARATHI_34B = Row(
    requests=512,
    ttft=(0.3628, 0.2626, 0.8733, 1.5720),
    tpot=(0.0372, 0.0364, 0.0423, 0.0611),
    end_to_end=(8.519, 5.749, 16.691, 22.699),
    gaps=(0.0305, 0.0415, 0.1081),
    slowest_gap_s=0.1136,
    last_end_s=501.966 - 1.020,
)
VLLM_34B = Row(
    requests=512,
    ttft=(0.3121, 0.2236, 0.7714, 1.2605),
    tpot=(0.0404, 0.0391, 0.0476, 0.0759),
    end_to_end=(9.128, 6.115, 17.981, 24.407),
    gaps=(0.0304, 0.0315, 0.2811),
    slowest_gap_s=3.384,
    last_end_s=502.211 - 1.020,
)
SARATHI_7B = Row(
    requests=128,
    ttft=(0.1948, 0.1838, 0.2209, 0.3391),
    tpot=(0.0140, 0.0137, 0.0176, 0.0192),
    end_to_end=(7.375, 7.193, 9.207, 10.025),
    gaps=(0.0130, 0.0171, 0.0433),
    slowest_gap_s=0.0480,
    last_end_s=240.46 - 2.040,
)

SARATHI_70B = Row(
    requests=512,
    ttft=(0.6484, 0.5178, 1.6412, 2.1590),
    tpot=(0.0833, 0.0821, 0.0964, 0.1288),
    end_to_end=(18.942, 12.941, 37.143, 52.195),
    gaps=(0.0595, 0.1969, 0.2169),
    slowest_gap_s=0.2849,
    last_end_s=518.15,
)
"""Two stages of two devices. Of that run it printed how many blocks there are; these are its scheduler's
rules written down anew over our models of performance (docs/simulator.md)."""
REPLICAS_END_TO_END_S = 3.99
"""Mean, of sixteen replicas of Llama-2-7b in turn: all that it printed of that run."""
REPLICAS_TTFT = (0.1189, 0.1000, 0.2885, 0.4484)
REPLICAS_TPOT = (0.0173, 0.0168, 0.0214, 0.0291)
REPLICAS_END = (3.8126, 2.3725, 7.8623, 11.1786)
"""Its output where its forests are trained on the very file that ours reads (docs/simulator.md)."""
BLOCKS = {"vidur_34b.toml": (27_904, 0.01), "vidur_7b.toml": (7_424, 0.03), "vidur_70b.toml": (32_768, 0.01)}
"""Of KV, and how near ours are by the memory beside the weights: there whole sequences are counted."""
SLOWEST_BETWEEN_LANES_S = 0.3896
"""By the same rules where a sequence stays in one of two batches that take turns."""


class Measured(NamedTuple):
    metrics: Metrics
    ttft: Column
    tpot: Column
    """Over all tokens, the first among them, as theirs."""
    end_to_end: Column


def tree_of(shared: Path, config: str, attention: Path | None = None) -> dict[str, Any]:
    tree = tomllib.loads((BENCH / config).read_text())
    for pool in tree["pool"]:
        performance = pool["performance"]
        for key in {"mlp", "attention", "all_reduce", "send_recv"} & set(performance):
            _, _, below = performance[key].partition("shared/")
            performance[key] = str(shared / below)
        if attention is not None:
            performance["attention"] = str(attention)
    return tree


def run_row(shared: Path, config: str, trace: str, attention: Path | None = None) -> Measured:
    tree = tree_of(shared, config, attention)
    requests = read_trace(shared / "data/vidur/request_inputs" / trace)
    cluster = simulate(simulated_from_tree(tree), Load(offered_of(requests, None, "poisson", 0)))
    columns = {name: each.astype(np.float64) for name, each in cluster.records.columns().items()}
    end_to_end = columns["end_s"] - columns["arrival_s"]
    ttft = columns["first_token_s"] - columns["arrival_s"]
    return Measured(measure(cluster), ttft, (end_to_end - ttft) / columns["drawn_tokens"], end_to_end)


def spread(values: Column) -> Spread:
    middle, ninety, last = np.percentile(values, (50, 90, 99)).tolist()
    return float(values.mean()), middle, ninety, last


def assert_its_figures(measured: Measured, row: Row) -> None:
    metrics = measured.metrics
    assert (metrics.done, metrics.requests) == (row.requests, row.requests)
    assert spread(measured.ttft) == pytest.approx(row.ttft, rel=TOLERANCE)
    assert spread(measured.tpot) == pytest.approx(row.tpot, rel=TOLERANCE)
    assert spread(measured.end_to_end) == pytest.approx(row.end_to_end, rel=TOLERANCE)
    median, ninety, _, last = metrics.tbt_s
    assert (median, ninety, last) == pytest.approx(row.gaps, rel=TOLERANCE)
    assert metrics.slowest_gap is not None
    assert metrics.slowest_gap.maximum_s == pytest.approx(row.slowest_gap_s, rel=TOLERANCE)
    assert metrics.elapsed_s == pytest.approx(row.last_end_s, rel=TOLERANCE / 10)


def test_decodes_with_chunks_beside_them_take_as_long_as_under_its_sarathi(shared_directory: Path) -> None:
    measured = run_row(shared_directory, "vidur_34b.toml", CONVERSATIONS)
    assert_its_figures(measured, SARATHI_34B)


def test_prompts_before_decodes_take_as_long_as_under_its_vllm(shared_directory: Path) -> None:
    measured = run_row(shared_directory, "vidur_34b_vllm.toml", CONVERSATIONS)
    assert_its_figures(measured, VLLM_34B)


def test_two_stages_take_as_long_as_by_its_rules(shared_directory: Path) -> None:
    """But for the slowest gaps: its next batch takes whoever waits, and here a batch is kept. A prompt's
    second token may wait for its batch's turn."""
    measured, row = run_row(shared_directory, "vidur_70b.toml", CONVERSATIONS), SARATHI_70B
    metrics = measured.metrics
    assert (metrics.done, metrics.requests) == (row.requests, row.requests)
    assert spread(measured.ttft) == pytest.approx(row.ttft, rel=TOLERANCE)
    assert spread(measured.tpot) == pytest.approx(row.tpot, rel=TOLERANCE)
    assert spread(measured.end_to_end) == pytest.approx(row.end_to_end, rel=TOLERANCE)
    assert metrics.elapsed_s == pytest.approx(row.last_end_s, rel=TOLERANCE / 10)
    median, ninety, *_ = metrics.tbt_s
    assert (median, ninety) == pytest.approx(row.gaps[:2], rel=TOLERANCE)
    assert metrics.slowest_gap is not None
    assert metrics.slowest_gap.maximum_s == pytest.approx(SLOWEST_BETWEEN_LANES_S, rel=TOLERANCE)
    assert metrics.slowest_gap.maximum_s > (1 + TOLERANCE) * row.slowest_gap_s


@pytest.mark.parametrize("config", BLOCKS)
def test_instances_hold_as_much_as_it_counts(
    shared_directory: Path, llama_attention: Path, config: str
) -> None:
    """It has 80 GiB a device, and counts whole sequences of 4,096 tokens."""
    blocks, tolerance = BLOCKS[config]
    tree = tree_of(shared_directory, config, llama_attention if config == "vidur_7b.toml" else None)
    [stated] = simulated_from_tree(tree).pools
    assert stated.total_blocks == blocks
    del tree["pool"][0]["kv_tokens"]
    tree["cluster"]["memory_share"] = 0.9 * (1 << 30) / 1e9
    [counted] = simulated_from_tree(tree).pools
    assert counted.total_blocks == pytest.approx(blocks, rel=tolerance)


def test_its_default_configuration_takes_as_long_as_there(
    shared_directory: Path, llama_attention: Path
) -> None:
    measured = run_row(shared_directory, "vidur_7b.toml", FIXED, llama_attention)
    assert_its_figures(measured, SARATHI_7B)


def test_sixteen_replicas_in_turn_take_as_long_as_there(
    shared_directory: Path, llama_attention: Path
) -> None:
    """But for the last percent of first tokens and of times per token, which are 6 to 8 % less."""
    measured = run_row(shared_directory, "vidur_7b16.toml", MANY, llama_attention)
    metrics = measured.metrics
    assert (metrics.done, metrics.requests) == (6000, 6000)
    assert float(measured.end_to_end.mean()) == pytest.approx(REPLICAS_END_TO_END_S, rel=TOLERANCE)
    assert spread(measured.end_to_end) == pytest.approx(REPLICAS_END, rel=TOLERANCE)
    ttft, tpot = spread(measured.ttft), spread(measured.tpot)
    assert ttft[:3] == pytest.approx(REPLICAS_TTFT[:3], rel=TOLERANCE)
    assert tpot[:3] == pytest.approx(REPLICAS_TPOT[:3], rel=TOLERANCE)
    assert ttft[3] == pytest.approx(REPLICAS_TTFT[3], rel=0.08)
    assert tpot[3] == pytest.approx(REPLICAS_TPOT[3], rel=0.08)
    assert [pool.preempted for pool in metrics.pools] == [0]


@pytest.fixture(scope="module")
def llama_attention(shared_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_attention(shared_directory, tmp_path_factory.mktemp("vidur") / "attention.csv")


def write_llama_attention(shared: Path, path: Path) -> Path:
    """Of Llama-2-7b, as their figures were made: decodes of a sample of its profile, prompts of another
    model's with as many query heads on each device."""
    prefill, decode = "time_stats.attn_prefill.median", "time_stats.attn_decode.median"
    widths = {"n_embd": 4096, "n_q_head": 32, "n_kv_head": 32, "num_tensor_parallel_workers": 1}
    cases = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    rows: list[dict[str, object]] = []
    with gzip.open(shared / GROUPED_ATTENTION, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["is_prefill"] == "True":
                rows.append({**{key: row[key] for key in cases}, prefill: row[prefill], decode: "", **widths})
    sample = shared / A100 / "meta-llama/Llama-2-7b-hf/attention_decode_tp1_sample82.csv"
    with sample.open(newline="") as lines:
        for row in csv.DictReader(lines):
            case = (row["batch_size"], 0, row["kv_cache_size"], "False")
            times = {prefill: "", decode: row["attn_decode_median_ms"]}
            rows.append({**dict(zip(cases, case, strict=True)), **times, **widths})
    return write_csv(path, rows)
