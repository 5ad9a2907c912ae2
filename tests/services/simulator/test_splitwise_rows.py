"""Whole traces against what splitwise-sim makes of them: same trace, same performance model, and its
assumptions as far as settings go. The figures are its output, seconds."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from common.devices import DEVICES
from services.bench.traces import read_trace
from services.simulator.config import simulated_from_tree
from services.simulator.metrics import Metrics, measure
from services.simulator.run import Load, offered_of, simulate

BENCH = Path(__file__).resolve().parents[3] / "bench"
CONVERSATIONS = "rr_conv_70_2min_seed0.csv.gz"
CODE = "rr_code_70_2min_seed0.csv.gz"
CROWDED = "rr_conv_130_1min_seed0.csv.gz"
STEP_S = 0.0355
"""Of a decode batch, whatever its size: by that performance model 35.3 to 36.2 ms."""
Column = NDArray[np.float64]
Spread = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Mean, median, 90th and 99th percentile. ``tbt``: over all tokens, the first among them."""

    ttft: Spread
    tbt: Spread
    end_to_end: Spread
    requests_per_s: float
    tokens_per_s: float


HH = Row(
    ttft=(0.1683, 0.1322, 0.3840, 0.6565),
    tbt=(0.0355, 0.0354, 0.0357, 0.0367),
    end_to_end=(7.623, 4.677, 15.210, 21.546),
    requests_per_s=56.16,
    tokens_per_s=11_808,
)
HH_SECOND = (0.0349, 0.1090)
"""From the first token until the second one's step begins: p50, p99."""
BASELINE = Row(
    ttft=(0.1999, 0.1651, 0.4102, 0.6841),
    tbt=(0.0464, 0.0459, 0.0541, 0.0670),
    end_to_end=(9.928, 6.220, 20.420, 28.602),
    requests_per_s=55.97,
    tokens_per_s=11_768,
)
BY_ITS_RULES = {
    "splitwise_aa.toml": Row(
        ttft=(0.3555, 0.2874, 0.8005, 1.3530),
        tbt=(0.0475, 0.0475, 0.0478, 0.0486),
        end_to_end=(10.349, 6.441, 20.511, 28.968),
        requests_per_s=52.10,
        tokens_per_s=10_955,
    ),
    "splitwise_hhcap.toml": Row(
        ttft=(0.1683, 0.1322, 0.3840, 0.6565),
        tbt=(0.0354, 0.0354, 0.0357, 0.0366),
        end_to_end=(7.616, 4.673, 15.195, 21.536),
        requests_per_s=56.16,
        tokens_per_s=11_809,
    ),
}
"""Of clusters of which no output is at hand: by the same rules, which give ``HH``, too, to every digit."""

HH_CODE = Row(
    ttft=(0.3568, 0.2237, 0.8976, 1.3194),
    tbt=(0.0374, 0.0359, 0.0416, 0.0545),
    end_to_end=(1.3688, 0.8303, 2.4203, 9.6265),
    requests_per_s=62.06,
    tokens_per_s=1_723,
)
HH_CODE_TTFT_HERE, HH_CODE_END_HERE = (0.3561, 0.2351, 0.9128, 1.359), (1.358, 0.8431, 2.387, 9.313)
"""The first by the same rules; the second where no machine changes its pool and those prompts are computed
together that come nearest to a chunk."""
BASELINE_CODE = Row(
    ttft=(0.3399, 0.2235, 0.8532, 1.3021),
    tbt=(0.0609, 0.0480, 0.1080, 0.2118),
    end_to_end=(2.0552, 1.1516, 3.9268, 16.0545),
    requests_per_s=58.17,
    tokens_per_s=1_615,
)
HH_CROWDED = Row(
    ttft=(0.3071, 0.2568, 0.6465, 0.9740),
    tbt=(0.0357, 0.0355, 0.0358, 0.0394),
    end_to_end=(7.7985, 4.8383, 15.4047, 21.8692),
    requests_per_s=92.68,
    tokens_per_s=19_476,
)
HH_CROWDED_TTFT_HERE = (0.1959, 0.1404, 0.4500, 0.7719)
"""By the same rules: five prompt machines come to decode, too; and where no machine changes its pool."""
BASELINE_CROWDED = Row(
    ttft=(0.2057, 0.1704, 0.4201, 0.6922),
    tbt=(0.0646, 0.0652, 0.0798, 0.1023),
    end_to_end=(13.3231, 8.7444, 28.4894, 38.5155),
    requests_per_s=88.84,
    tokens_per_s=18_667,
)
CORRECTED = {
    "splitwise_hh.toml": Row(
        ttft=(0.1725, 0.1326, 0.3962, 0.6943),
        tbt=(0.1230, 0.0936, 0.2116, 0.4872),
        end_to_end=(20.690, 17.518, 40.011, 50.285),
        requests_per_s=48.06,
        tokens_per_s=10_106,
    ),
    "splitwise_baseline.toml": Row(
        ttft=(0.2091, 0.1641, 0.4265, 0.7338),
        tbt=(0.0604, 0.0603, 0.0702, 0.0838),
        end_to_end=(12.872, 8.072, 26.798, 36.626),
        requests_per_s=54.20,
        tokens_per_s=11_397,
    ),
}
"""Ours, as docs/simulator.md has them: nobody else's are by that model."""
PRINTED = 0.002


@dataclass(frozen=True, slots=True)
class Simulated:
    metrics: Metrics
    columns: dict[str, Column]

    def between(self, first: str, last: str) -> Column:
        return self.columns[last] - self.columns[first]

    @property
    def found(self) -> Row:
        return Row(
            spread(self.between("arrival_s", "first_token_s")),
            spread(self.between("first_token_s", "end_s") / self.columns["drawn_tokens"]),
            spread(self.between("arrival_s", "end_s")),
            self.metrics.requests_per_s,
            self.metrics.tokens_per_s,
        )


def spread(values: Column) -> Spread:
    middle, ninety, last = np.percentile(values, (50, 90, 99)).tolist()
    return float(values.mean()), middle, ninety, last


def simulated(
    shared: Path,
    config: str,
    trace: str,
    count: int | None = None,
    *,
    is_corrected: bool = False,
    is_reserved: bool = False,
    is_overflowing: bool = False,
) -> Simulated:
    """``count``: of each pool's instances, in place of what the file says. ``is_corrected``: steps by batch
    and context, too. ``is_reserved``: whoever begins to decode has room for all that it draws, as there.
    ``is_overflowing``: machines help the others where these are full."""
    tree = tomllib.loads((BENCH / config).read_text())
    if is_overflowing:
        tree["roles"] = {"policy": "overflow"}
    if is_reserved:
        tree["instance"]["decode_admission"] = "reserve_static"
        tree["predictor"] = {"kind": "oracle", "lengths_file": "of the trace"}
    for pool in tree["pool"]:
        pool["performance"] |= {
            "path": str(shared / "data/splitwise/perf_model.csv"),
            "is_corrected": is_corrected,
        }
        pool["count"] = count or pool["count"]
    requests = read_trace(shared / "data/splitwise" / trace)
    cluster = simulate(simulated_from_tree(tree), Load(offered_of(requests, None, "poisson", 0)))
    columns = {name: each.astype(np.float64) for name, each in cluster.records.columns().items()}
    return Simulated(measure(cluster), columns)


@pytest.mark.parametrize("design", ["aa", "ha", "hh", "hhcap", "baseline", "baseline_a100"])
def test_all_have_the_power_that_forty_machines_of_h100_have(design: str) -> None:
    pools = tomllib.loads((BENCH / f"splitwise_{design}.toml").read_text())["pool"]
    power_w = sum(pool["count"] * pool["devices"] * DEVICES[pool["device"]].power_w for pool in pools)
    assert power_w == pytest.approx(40 * 8 * 700, rel=0.01)


@pytest.fixture(scope="module")
def split(shared_directory: Path) -> Simulated:
    """Splitwise-HH 25P/15T."""
    return simulated(shared_directory, "splitwise_hh.toml", CONVERSATIONS)


def test_its_latencies_and_throughput_come_out(split: Simulated) -> None:
    assert (split.metrics.done, split.metrics.requests) == (8502, 8502)
    found = split.found
    # Nobody queues for a prompt machine: only what is computed together could differ.
    assert found.ttft == pytest.approx(HH.ttft, abs=1e-4)
    assert found.end_to_end == pytest.approx(HH.end_to_end, rel=0.005)
    assert found.tbt == pytest.approx(HH.tbt, rel=0.03)
    assert found.requests_per_s == pytest.approx(HH.requests_per_s, rel=0.005)
    assert found.tokens_per_s == pytest.approx(HH.tokens_per_s, rel=0.005)


@pytest.mark.parametrize("config", BY_ITS_RULES)
def test_other_machines_come_out_as_by_its_rules(shared_directory: Path, config: str) -> None:
    row, found = BY_ITS_RULES[config], simulated(shared_directory, config, CONVERSATIONS).found
    assert found.ttft == pytest.approx(row.ttft, abs=1e-4)
    assert found.end_to_end == pytest.approx(row.end_to_end, rel=0.005)
    assert found.tbt == pytest.approx(row.tbt, rel=0.03)
    assert found.requests_per_s == pytest.approx(row.requests_per_s, rel=0.005)
    assert found.tokens_per_s == pytest.approx(row.tokens_per_s, rel=0.005)


def test_a_second_token_comes_as_soon_as_where_kv_is_pushed(split: Simulated) -> None:
    waits = split.between("first_token_s", "second_token_s")
    found = [float(np.nanpercentile(waits, at)) - STEP_S for at in (50, 99)]
    assert found == pytest.approx(HH_SECOND, rel=0.03)


def test_machines_that_compute_both_come_out(shared_directory: Path) -> None:
    both = simulated(shared_directory, "splitwise_baseline.toml", CONVERSATIONS)
    assert (both.metrics.done, both.metrics.requests) == (8502, 8502)
    found = both.found
    assert found.ttft == pytest.approx(BASELINE.ttft, rel=0.012)
    assert found.tbt == pytest.approx(BASELINE.tbt, rel=0.01)
    assert found.end_to_end == pytest.approx(BASELINE.end_to_end, rel=0.015)
    assert found.requests_per_s == pytest.approx(BASELINE.requests_per_s, rel=0.005)
    assert found.tokens_per_s == pytest.approx(BASELINE.tokens_per_s, rel=0.005)


def test_code_on_split_machines_comes_out_but_for_two_rules(shared_directory: Path) -> None:
    """Within 3 % but for TTFT's median and the last percent of ends, of which both rules say why."""
    found = simulated(shared_directory, "splitwise_hh.toml", CODE).found
    assert (found.ttft[0], *found.ttft[2:]) == pytest.approx((HH_CODE.ttft[0], *HH_CODE.ttft[2:]), rel=0.03)
    assert found.end_to_end[:3] == pytest.approx(HH_CODE.end_to_end[:3], rel=0.03)
    assert found.tbt[:3] == pytest.approx(HH_CODE.tbt[:3], rel=0.03)
    assert found.requests_per_s == pytest.approx(HH_CODE.requests_per_s, rel=0.005)
    assert found.tokens_per_s == pytest.approx(HH_CODE.tokens_per_s, rel=0.005)
    assert found.ttft == pytest.approx(HH_CODE_TTFT_HERE, rel=0.01)
    assert found.end_to_end == pytest.approx(HH_CODE_END_HERE, rel=0.005)
    assert found.ttft[1] > 1.03 * HH_CODE.ttft[1]
    assert found.end_to_end[3] < 0.97 * HH_CODE.end_to_end[3]


def test_code_on_machines_that_compute_both_comes_out(shared_directory: Path) -> None:
    """Within 1.5 % but for the last percent, and for who ends last: some of the decodes that do not all fit
    go along there."""
    found = simulated(shared_directory, "splitwise_baseline.toml", CODE).found
    row = BASELINE_CODE
    assert found.ttft == pytest.approx(row.ttft, rel=0.005)
    assert found.end_to_end[:3] == pytest.approx(row.end_to_end[:3], rel=0.016)
    assert found.end_to_end[3] == pytest.approx(row.end_to_end[3], rel=0.03)
    assert found.tbt[:3] == pytest.approx(row.tbt[:3], rel=0.01)
    assert found.tbt[3] == pytest.approx(row.tbt[3], rel=0.04)
    assert found.requests_per_s == pytest.approx(row.requests_per_s, rel=0.025)
    assert found.tokens_per_s == pytest.approx(row.tokens_per_s, rel=0.025)


@pytest.fixture(scope="module")
def crowded(shared_directory: Path) -> Simulated:
    """Splitwise-HH where its token machines are full."""
    return simulated(shared_directory, "splitwise_hh.toml", CROWDED)


def test_where_token_machines_are_full_prompts_keep_their_machines(crowded: Simulated) -> None:
    """Ends are within 3 %. First tokens come a third sooner: there five prompt machines decode, too."""
    assert (crowded.metrics.done, crowded.metrics.requests) == (7866, 7866)
    found = crowded.found
    assert found.end_to_end == pytest.approx(HH_CROWDED.end_to_end, rel=0.03)
    assert found.requests_per_s == pytest.approx(HH_CROWDED.requests_per_s, rel=0.005)
    assert found.tokens_per_s == pytest.approx(HH_CROWDED.tokens_per_s, rel=0.005)
    assert found.ttft == pytest.approx(HH_CROWDED_TTFT_HERE, rel=0.03)
    assert found.ttft[0] < 0.7 * HH_CROWDED.ttft[0]
    assert found.tbt[1] == pytest.approx(HH_CROWDED.tbt[1], rel=0.03)
    assert found.tbt[2] > 1.03 * HH_CROWDED.tbt[2]


def test_where_prompt_machines_help_token_machines_ends_and_times_per_token_come_out(
    shared_directory: Path,
) -> None:
    """By two of them, where there are five, which prompts then avoid: first tokens come a quarter sooner."""
    helped = simulated(shared_directory, "splitwise_hh.toml", CROWDED, is_overflowing=True)
    found = helped.found
    roles = [each.detail for each in helped.metrics.changes if each.kind == "role"]
    assert sum(each.startswith("mixed") for each in roles) == 2
    assert found.end_to_end == pytest.approx(HH_CROWDED.end_to_end, rel=0.016)
    assert found.tbt == pytest.approx(HH_CROWDED.tbt, rel=0.03)
    assert found.requests_per_s == pytest.approx(HH_CROWDED.requests_per_s, rel=0.005)
    assert 0.7 * HH_CROWDED.ttft[0] < found.ttft[0] < 0.75 * HH_CROWDED.ttft[0]


def test_split_machines_sustain_what_others_do_not(shared_directory: Path, crowded: Simulated) -> None:
    """At 130 conversations a second, as there."""
    both = simulated(shared_directory, "splitwise_baseline.toml", CROWDED, is_reserved=True)
    assert (both.metrics.done, both.metrics.requests) == (7866, 7866)
    found = both.found
    assert found.ttft == pytest.approx(BASELINE_CROWDED.ttft, rel=0.03)
    assert found.tbt == pytest.approx(BASELINE_CROWDED.tbt, rel=0.01)
    assert found.end_to_end == pytest.approx(BASELINE_CROWDED.end_to_end, rel=0.007)
    assert found.requests_per_s == pytest.approx(BASELINE_CROWDED.requests_per_s, rel=0.01)
    assert crowded.found.end_to_end[0] < 0.6 * found.end_to_end[0]
    assert crowded.found.tbt[2] < 0.5 * found.tbt[2]


@pytest.mark.parametrize("config", CORRECTED)
def test_steps_that_know_their_batch_take_what_the_document_says(shared_directory: Path, config: str) -> None:
    row, found = (
        CORRECTED[config],
        simulated(shared_directory, config, CONVERSATIONS, is_corrected=True).found,
    )
    assert found.ttft == pytest.approx(row.ttft, rel=PRINTED)
    assert found.tbt == pytest.approx(row.tbt, rel=PRINTED)
    assert found.end_to_end == pytest.approx(row.end_to_end, rel=PRINTED)
    assert found.requests_per_s == pytest.approx(row.requests_per_s, rel=PRINTED)
    assert found.tokens_per_s == pytest.approx(row.tokens_per_s, rel=PRINTED)


def test_single_machines_come_out_to_its_last_digit(shared_directory: Path) -> None:
    """Its example of three requests, on one H100 machine, and on one with an A100 machine for tokens."""
    trace = "test_trace.csv"
    alone = simulated(shared_directory, "splitwise_baseline.toml", trace, count=1)
    ttft = [0.649598, 0.251964, 0.251964]
    assert alone.between("arrival_s", "first_token_s").tolist() == pytest.approx(ttft, abs=1e-6)
    ends = [1.744743, 0.499255, 0.781873]
    assert alone.between("arrival_s", "end_s").tolist() == pytest.approx(ends, abs=1e-6)
    split = simulated(shared_directory, "splitwise_ha.toml", trace, count=1)
    assert split.between("arrival_s", "first_token_s").tolist() == pytest.approx(ttft, abs=1e-6)
    ends = [2.199226, 0.622873, 1.003019]
    assert split.between("arrival_s", "end_s").tolist() == pytest.approx(ends, abs=1e-6)
    # Their KV moves in 76.6 and 38.3 ms; a step is of one sequence.
    steps = split.between("first_token_s", "second_token_s") - [0.0765625, 0.0382812, 0.0382812]
    assert steps.tolist() == pytest.approx([0.047518] * 3, abs=1e-6)
