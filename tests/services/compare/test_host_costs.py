"""What a mesh takes beside its passes, from runs whose costs are known."""

import msgspec
import pytest

from services.compare.host_costs import Counted, costs_of, host_of
from services.compare.records import RunRecord
from tests.services.compare.test_figures import run


def test_costs_come_out_of_runs_that_had_them() -> None:
    costs = (0.001, 0.0002, 0.008)
    counts = [(240, 240, 10), (480, 1400, 8), (200, 570, 24), (90, 700, 3)]
    taken = [sum(cost * count for cost, count in zip(costs, row, strict=True)) for row in counts]
    assert costs_of(counts, taken) == pytest.approx(costs)


def test_no_cost_is_under_nothing_and_what_was_not_counted_costs_nothing() -> None:
    found = costs_of([(100, 200, 1), (100, 10, 1)], [0.1, 0.2])
    assert min(found) == 0.0
    assert costs_of([(100, 200, 0)], [0.0]) == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def test_a_short_run_that_was_off_by_as_much_as_it_took_hardly_counts_beside_a_long_one() -> None:
    assert costs_of([(10,), (1000,)], [0.02, 1.0]) == pytest.approx([0.001], rel=0.01)
    # But two that take alike count alike.
    assert costs_of([(1000,), (1000,)], [1.1, 0.9]) == pytest.approx([0.001], rel=0.02)


def looked_at(beside_s: float) -> RunRecord:
    return msgspec.structs.replace(
        run("split", 0, 1.0, 1.0),
        duration_s=20.0,
        beside_cpu_s=beside_s,
        idle_cores=0.05,
        cores=2,
    )


def test_a_host_is_what_its_runs_took_of_it() -> None:
    counted = Counted(passes=300, tokens=300, prompts=0, prompt_tokens=0)
    host = host_of([(looked_at(1.3), counted)])
    assert host is not None
    assert (host.cores, host.idle_cores) == (2, 0.05)
    assert host.pass_s + host.token_s == pytest.approx(0.001)


def test_a_prompt_s_tokens_are_told_from_prompts_by_runs_of_unlike_lengths() -> None:
    runs = [
        Counted(passes=100 + 200 * long, tokens=400, prompts=20, prompt_tokens=500 + 9500 * long)
        for long in (0, 1)
    ] + [Counted(passes=300, tokens=900, prompts=60, prompt_tokens=900)]
    records = [looked_at(1.0 + each.passes * 0.001 + each.prompt_tokens * 3e-5) for each in runs]
    host = host_of(list(zip(records, runs, strict=True)))
    assert host is not None
    assert host.pass_s == pytest.approx(0.001)
    assert host.prompt_token_s == pytest.approx(3e-5)


def test_runs_whose_processor_time_was_not_looked_at_say_nothing() -> None:
    record = msgspec.structs.replace(looked_at(1.0), idle_cores=None)
    assert host_of([(record, Counted(1, 1, 1, 1))]) is None
    assert host_of([]) is None
