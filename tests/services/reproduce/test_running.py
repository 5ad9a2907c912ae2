"""Searches, and what rows are made of."""

import math
from pathlib import Path

import pytest

from common.latency import ServiceObjectives
from services.bench.lengths import LengthPair, is_of_workload
from services.planner.provisioning import SLOWDOWNS
from services.reproduce.data import DataFiles
from services.reproduce.distserve_servers import Server, longest_prompt, tree_of
from services.reproduce.lamina_decoding import held_context
from services.reproduce.row import Reproduced, Table, sentences
from services.reproduce.running import fewest, largest_rate, poisson, run_metrics, scaled
from services.reproduce.splitwise_clusters import (
    AA,
    BASELINE_A100,
    BASELINE_H100,
    CORRECTED,
    HA,
    HH,
    ISO_POWER,
    PUBLISHED,
    Assumed,
    Slowdowns,
    slowdowns_of,
)
from services.reproduce.tetriinfer import lengths_of_workload


@pytest.mark.parametrize("bound", [1.3, 7.0, 15.9])
def test_the_largest_rate_is_found_to_its_share(bound: float) -> None:
    found = largest_rate(lambda rate: rate <= bound, 1.0, 16.0, 0.05)
    assert found <= bound < 1.051 * found


def test_what_serves_nothing_has_no_rate() -> None:
    assert largest_rate(lambda _: False, 1.0, 16.0, 0.05) == 0.0


@pytest.mark.parametrize("least", range(3, 9))
def test_the_fewest_that_are_enough(least: int) -> None:
    assert fewest(lambda count: count >= least, 3, 8) == least


def test_where_not_even_the_most_are_enough_there_are_none() -> None:
    assert fewest(lambda _: False, 1, 8) is None


def test_another_rate_stretches_the_same_arrivals() -> None:
    lengths = [LengthPair(10, 5)] * 50
    slow, fast = poisson(lengths, 2.0), poisson(lengths, 8.0)
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival_s == pytest.approx(4 * other.arrival_s)
    assert slow[-1].arrival_s == pytest.approx(25, rel=0.4)


def test_a_share_of_few_requests_is_still_some() -> None:
    assert (scaled(400, 0.5), scaled(400, 0.001)) == (200, 20)


def test_a_table_has_a_cell_for_every_column_and_the_first_one_two_sides() -> None:
    with pytest.raises(ValueError, match="as many cells"):
        Table(("", "paper", "ours"), (("a", "1"),))
    with pytest.raises(ValueError, match="side by side"):
        Reproduced((Table(("", "ours"), (("a", "1"),)),), (), (), ())


def test_sentences_are_paragraphs() -> None:
    assert sentences("\na b\nc\n\nd\n") == ("a b c", "d")


def test_designs_of_equal_power_have_about_the_same() -> None:
    for design in ISO_POWER:
        assert design.power == pytest.approx(BASELINE_H100.power, rel=0.03)
    # Table V: ten per cent less cost.
    assert HA.cost / BASELINE_H100.cost == pytest.approx(0.9, abs=0.015)
    assert AA.cost == BASELINE_A100.cost == 70
    assert str(HH) == "Splitwise-HH (25P, 15T)"


def test_broken_objectives_are_named_the_worst_first() -> None:
    found = Slowdowns({**SLOWDOWNS, "TBT": (1.5, 1.4, 10.0)})
    assert found.broken == ("TBT P99", "TBT P50")


@pytest.mark.parametrize("assumed", [PUBLISHED, CORRECTED])
def test_alone_on_its_reference_machine_nobody_is_slower(shared_directory: Path, assumed: Assumed) -> None:
    """One request at a time takes as long as it would there: that is what slowdowns are over. A prompt of
    more than a batch's tokens is computed whole, too."""
    requests = poisson([LengthPair(512, 40), LengthPair(5_000, 40)] * 4, 0.01)
    found = slowdowns_of(BASELINE_A100, requests, DataFiles(shared_directory / "data"), assumed)
    for name in ("TTFT", "TBT", "E2E"):
        assert found.of[name] == pytest.approx((1.0, 1.0, 1.0), rel=1e-9), name


def test_the_longest_prompt_in_time_is_just_in_time(shared_directory: Path) -> None:
    files, vllm = DataFiles(shared_directory / "data"), Server("vLLM", "opt-13b", 1)
    longest = longest_prompt(vllm, files, 0.2)
    objectives = ServiceObjectives(ttft_s=0.2)
    shares = [
        run_metrics(tree_of(vllm, files), poisson([LengthPair(tokens, 2)], 1.0), objectives).attainment
        for tokens in (longest, longest + 1)
    ]
    assert [each.share for each in shares if each is not None] == [1.0, 0.0]


@pytest.mark.parametrize("workload", ["lpld", "lphd", "hpld", "hphd"])
def test_a_workload_has_its_own_lengths_with_a_trace_or_without(
    shared_directory: Path, workload: str
) -> None:
    for files in (DataFiles(shared_directory / "data"), DataFiles(None)):
        found = lengths_of_workload(files, workload, 64)
        assert len(found.pairs) == 64
        assert all(is_of_workload(each, workload) for each in found.pairs)
    assert "is not there" in found.described


def test_a_long_answer_weighs_more_in_the_context_that_is_held() -> None:
    pairs = (LengthPair(100, 1), LengthPair(1000, 99))
    held = (1 * (100 + 1.0) + 99 * (1000 + 50.0)) / 100
    assert held_context(pairs) == math.floor(held + 0.5)
