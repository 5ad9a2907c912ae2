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
    host = host_of([(looked_at(1.3), counted)], "split")
    assert host is not None
    assert (host.cores, host.idle_cores) == (2, 0.05)
    assert host.pass_s + host.token_s == pytest.approx(0.001)


def test_a_prompt_s_tokens_are_told_from_prompts_by_runs_of_unlike_lengths() -> None:
    runs = [Counted(100 + 200 * long, 400, 20, 500 + 9500 * long, is_handed_over=True) for long in (0, 1)] + [
        Counted(300, 900, 60, 900, is_handed_over=True)
    ]
    records = [looked_at(1.0 + each.passes * 0.001 + each.prompt_tokens * 3e-5) for each in runs]
    host = host_of(list(zip(records, runs, strict=True)), "split")
    assert host is not None
    assert host.pass_s == pytest.approx(0.001)
    assert host.prompt_token_s == pytest.approx(3e-5)


def test_runs_whose_processor_time_was_not_looked_at_say_nothing() -> None:
    record = msgspec.structs.replace(looked_at(1.0), idle_cores=None)
    assert host_of([(record, Counted(1, 1, 1, 1))], "split") is None
    assert host_of([], "split") is None
    other = msgspec.structs.replace(looked_at(1.0), configuration="other")
    assert host_of([(other, Counted(1, 1, 1, 1))], "split") is None


def test_messages_cost_all_meshes_alike_and_hand_overs_those_that_have_them() -> None:
    """Each mesh has its own idle time."""
    runs = []
    for name, idle_cores, handed in (("split", 0.05, True), ("mixed", 0.03, False)):
        for counted in (
            Counted(300, 400, 20, 500, handed),
            Counted(900, 4000, 30, 9000, handed),
            Counted(200, 300, 90, 900, handed),
        ):
            more_s = counted.prompts * 0.003 + counted.prompt_tokens * 2e-5 if handed else 0.0
            beside_s = counted.passes * 0.001 + counted.tokens * 2e-5 + counted.prompts * 0.004 + more_s
            record = looked_at(20 * idle_cores + beside_s)
            runs.append((msgspec.structs.replace(record, configuration=name, idle_cores=idle_cores), counted))
    split, mixed = host_of(runs, "split"), host_of(runs, "mixed")
    assert split is not None
    assert mixed is not None
    for host in (split, mixed):
        assert (host.pass_s, host.token_s) == pytest.approx((0.001, 2e-5))
    assert (split.prompt_s, split.prompt_token_s, split.idle_cores) == pytest.approx((0.007, 2e-5, 0.05))
    assert (mixed.prompt_s, mixed.prompt_token_s, mixed.idle_cores) == pytest.approx((0.004, 0.0, 0.03))
