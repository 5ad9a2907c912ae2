"""Medians over rounds, ratios within one, and what the table says; worked by hand."""

from array import array
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from common.errors import ConfigError
from common.latency import ServiceObjectives
from services.bench.client import Failure, Outcome
from services.bench.plan import Truncations
from services.bench.stream import Usage
from services.bench.summary import load_window, summarize
from services.compare.comparison import Candidate, Comparison, Offer
from services.compare.figures import JCT, RESOURCE_TIME, TTFT, make_cells, markdown_table, median_ratio
from services.compare.picture import draw_comparison
from services.compare.records import RunRecord, keep, read_kept

COMPARISON = Comparison(
    name="by-hand",
    workload=(Offer(name="lpld", requests=1, rate_per_s=1.0, ttft_s=1.0, tpot_s=1.0),),
    configuration=(
        Candidate(name="coupled", instances={"prefill": 1, "decode": 1}),
        Candidate(name="split", instances={"prefill": 1, "decode": 1}),
    ),
)


def run(configuration: str, round_number: int, ttft_s: float, resource_time_s: float) -> RunRecord:
    """One request whose last token comes a second after its first; another one that is refused."""
    served = Outcome(
        class_name="foreground",
        index=0,
        prompt_tokens=4,
        output_tokens=2,
        arrival_s=0.0,
        due_s=0.0,
        sent_s=0.0,
        finished_s=ttft_s + 1.0,
        token_times_s=array("d", [ttft_s, ttft_s + 1.0]),
        usage=Usage(4, 2),
        has_done=True,
        failure=None,
        is_cut=False,
    )
    refused = replace(served, index=1, token_times_s=array("d"), failure=Failure("http_503", "full"))
    outcomes = [served, refused] if configuration == "split" else [served]
    window = load_window(outcomes)
    assert window is not None
    load, _ = summarize(
        "foreground", "by hand", outcomes, window, ServiceObjectives(ttft_s=1.0), Truncations()
    )
    return RunRecord(
        fingerprint=COMPARISON.fingerprint,
        round_number=round_number,
        workload="lpld",
        configuration=configuration,
        rate_per_s=1.0,
        started_at="2026-11-21T00:00:00+00:00",
        duration_s=3.0,
        load=load,
        uses=(),
        resource_time_s=resource_time_s,
        instances_cpu_s=1.0,
        services_cpu_s=0.5,
        client_cpu_share=0.1,
    )


RUNS = (
    run("coupled", 0, 0.5, 10.0),
    run("split", 0, 0.25, 12.0),
    run("coupled", 1, 2.0, 20.0),
    run("split", 1, 0.5, 22.0),
    run("split", 2, 9.0, 99.0),
)


def test_ratios_are_of_runs_of_the_same_round() -> None:
    coupled, split = make_cells(COMPARISON, RUNS)
    assert coupled.median(TTFT) == pytest.approx(1.25)
    assert split.median(TTFT) == pytest.approx(0.5)
    assert median_ratio(split, coupled, TTFT) == pytest.approx((0.5 + 0.25) / 2)
    assert median_ratio(split, coupled, RESOURCE_TIME) == pytest.approx((1.2 + 1.1) / 2)
    assert coupled.median(JCT) == pytest.approx(2.25)


def test_the_table_says_medians_ratios_and_who_was_not_served() -> None:
    table = markdown_table(COMPARISON, make_cells(COMPARISON, RUNS))
    header, _, coupled, split = table.splitlines()
    assert header.count("|") == coupled.count("|") == split.count("|")
    assert coupled.startswith("| LPLD | coupled | 1.25, 1.25 | 1,000, 1,000 | 2.2, 2.2 |")
    assert "| 0.50, 0.50 (0.38 ×) |" in split
    assert "50 %, 3 not served" in split


def test_runs_are_read_back_and_those_of_another_comparison_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert read_kept(file, RunRecord, COMPARISON) == []
    for record in RUNS:
        keep(file, record)
    assert read_kept(file, RunRecord, COMPARISON) == list(RUNS)
    keep(file, msgspec.structs.replace(RUNS[0], fingerprint="of another"))
    with pytest.raises(ConfigError, match="line 6 is of another comparison"):
        read_kept(file, RunRecord, COMPARISON)


def test_a_picture_is_drawn_of_what_there_is(tmp_path: Path) -> None:
    for records in (RUNS, RUNS[:1]):
        picture = tmp_path / f"{len(records)}.svg"
        draw_comparison(picture, COMPARISON, make_cells(COMPARISON, records))
        assert "<svg" in picture.read_text()[:500]
