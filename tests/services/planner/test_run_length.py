"""A trace that is over before its requests would have left says nothing about a backlog, and is refused."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.bench.arrivals import make_arrivals
from services.planner.budget import budget_of
from services.planner.candidates import PoolPlan
from services.planner.preparing import PlanRequest, Prepared, prepare
from services.planner.probes import Probe
from services.planner.run_length import bursts_of, caveat_of, check_length
from services.planner.searches import SearchName, search_of
from services.planner.simulating import run_probe
from services.planner.workload import workload_of
from services.simulator.requested import Requested

SPACE = {
    "space": {
        "tensors": [1, 8],
        "pipelines": [1],
        "batches": [32],
        "policies": [["chunked", 512]],
        "chunks": [["chunks", 512]],
    }
}


def prepared_at(rate_per_s: float, folder: Path, count: int = 600) -> Prepared:
    """Requests stay for more than a second on the quickest of all kinds."""
    trace = folder / f"{count}.csv"
    rows = [f"{100 + 37 * number % 400},{300 + 31 * number % 200}" for number in range(count)]
    trace.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return prepare(
        PlanRequest(
            model="llama3-8b",
            requested=Requested(trace),
            slo="ttft=5,tpot=0.2",
            devices="h100",
            rate_per_s=rate_per_s,
            settings=SPACE,
            ends_early=False,
        )
    )


def test_a_run_that_any_number_of_instances_would_fail_is_refused(tmp_path: Path) -> None:
    prepared = prepared_at(1_000.0, tmp_path)
    pools = (PoolPlan(kind=prepared.kinds.mixed[-1], count=200),)
    unserved = run_probe(Probe(pools=pools, rate_per_s=1_000.0, requests=600), prepared.conditions)
    assert unserved.attainment == 1.0
    assert unserved.left_share > 0
    with pytest.raises(ConfigError) as caught:
        check_length(prepared)
    assert (caught.value.key, caught.value.value) == ("--rate", 1_000.0)
    assert "no run says whether work piles up" in caught.value.rule
    longest = max(prepared.conditions.rows, key=lambda row: row.output_tokens * 10_000 + row.prompt_tokens)
    number = prepared.conditions.rows.index(longest) + 1
    tokens = f"{longest.prompt_tokens} + {longest.output_tokens} tokens"
    assert f"(longest number {number}, of {tokens}, for " in caught.value.rule


def test_a_run_whose_requests_all_come_before_any_goes_is_refused(tmp_path: Path) -> None:
    """However few they are: any instance that takes them in would pass for one that keeps up."""
    with pytest.raises(ConfigError, match="is too much for 20 requests") as caught:
        check_length(prepared_at(1_000.0, tmp_path, 20))
    assert (caught.value.key, caught.value.value) == ("--rate", 1_000.0)


def test_the_length_and_the_rate_that_it_names_are_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_length(prepared_at(1_000.0, tmp_path))
    words = caught.value.rule.split()
    needed = int(words[words.index("(a") - 2])
    rate = float(words[-1].removesuffix("/s"))
    assert 600 < needed < 10_000
    longer, slower = prepared_at(1_000.0, tmp_path, needed), prepared_at(rate, tmp_path)
    for each in (longer, slower):
        check_length(each)
        pools = (PoolPlan(kind=each.kinds.mixed[-1], count=200),)
        count, rate_per_s = len(each.conditions.rows), each.demand.rate_per_s
        probe = Probe(pools=pools, rate_per_s=rate_per_s, requests=count)
        assert run_probe(probe, each.conditions).left_share <= 0


@pytest.mark.parametrize(("search", "is_refused"), [("splitwise", True), ("aladdin", True), ("vidur", False)])
def test_searches_that_look_for_a_backlog_at_the_rate_refuse_it(
    tmp_path: Path, search: SearchName, is_refused: bool
) -> None:
    prepared = prepared_at(1_000.0, tmp_path)
    if is_refused:
        with pytest.raises(ConfigError, match="must last"):
            search_of(search, prepared)
    else:
        search_of(search, prepared)


def test_where_the_rate_is_what_is_looked_for_any_length_is_taken(tmp_path: Path) -> None:
    prepared = prepared_at(1_000.0, tmp_path)
    budget = budget_of(prepared.devices, max_devices=8)
    demand = replace(prepared.demand, objective="throughput", budget=budget)
    check_length(replace(prepared, demand=demand))


def test_a_trace_that_is_burstier_than_what_is_simulated_is_told_of(tmp_path: Path) -> None:
    prepared = prepared_at(40.0, tmp_path)
    assert bursts_of(prepared) is None, "its requests have lengths alone"
    for burstiness, is_told in ((1.0, False), (0.25, True)):
        arrivals_s = islice(make_arrivals("poisson", 40.0, 1, burstiness), 600)
        rows = prepared.conditions.rows
        came = [replace(row, arrival_s=each_s) for row, each_s in zip(rows, arrivals_s, strict=True)]
        bursty = replace(prepared, workload=workload_of(came))
        said = bursts_of(bursty)
        assert (said is not None) == is_told
        if said is not None:
            assert "gaps deviate by" in said
            named = float(said.split("--burstiness ")[1].split()[0])
            assert named == pytest.approx(0.25, rel=0.25)
            planned = replace(bursty, conditions=replace(bursty.conditions, burstiness=named))
            assert bursts_of(planned) is None


def test_bursts_make_the_same_instances_keep_fewer_objectives(tmp_path: Path) -> None:
    """Some dozen prompts come at once, where one takes a hundredth of a second."""
    prepared = prepared_at(40.0, tmp_path)
    objectives = replace(prepared.conditions.objectives, ttft_s=0.05)
    kept = []
    for burstiness in (1.0, 0.05):
        conditions = replace(prepared.conditions, burstiness=burstiness, goal=None, objectives=objectives)
        pools = (PoolPlan(kind=prepared.kinds.mixed[0], count=2),)
        probe = Probe(pools=pools, rate_per_s=40.0, requests=600)
        kept.append(run_probe(probe, conditions).attainment)
    poisson, bursty = kept
    assert bursty < poisson - 0.1


def test_few_requests_for_what_objectives_allow_are_told_of(tmp_path: Path) -> None:
    """One of 400 tokens may stay for 5 s and 0.2 s a token."""
    said = caveat_of(prepared_at(40.0, tmp_path))
    assert said is not None
    assert "these 600 come within 15 s" in said
    enough = int(said.split()[-3].replace(",", ""))
    assert 4 * 40 * 80 < enough < 4 * 40 * 100
    assert caveat_of(prepared_at(40.0, tmp_path, count=enough)) is None
    assert caveat_of(prepared_at(1.0, tmp_path)) is None
