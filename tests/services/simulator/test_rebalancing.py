"""Sequences leave a simulated instance that is running out of memory, as live ones do."""

import pytest

from services.simulator.metrics import measure
from services.simulator.tables import Run, comparison_table, summary_of
from tests.services.simulator.meshes import mesh, pool, run


@pytest.mark.parametrize("is_on", [True, False])
def test_who_leaves_is_found_where_the_scheduler_is_to_look_for_it(is_on: bool) -> None:
    """Every second request draws 1,500 tokens: one instance of two comes to lack memory, and the other one
    has plenty."""
    rules = {"decode_policy": "round_robin", "rebalance_decodes": is_on}
    simulated = mesh(pool("prefill"), pool("decode", 2, kv_tokens=4_000), scheduler=rules)
    requests = [(0.1 * number, 100, 1_500 if number % 2 == 0 else 10) for number in range(6)]
    cluster = run(simulated, *requests)
    assert list(cluster.records.drawn_tokens) == [tokens for _, _, tokens in requests]
    assert (cluster.schedulers.asked_to_leave > 0) == is_on
    metrics = measure(cluster)
    assert metrics.asked_to_leave == cluster.schedulers.asked_to_leave
    assert (metrics.moved > 0) == is_on
    told = [line for line in summary_of(metrics) if "would run out of memory" in line]
    assert len(told) == is_on
    compared = comparison_table([Run("one", metrics), Run("other", metrics)])
    row = list(compared.columns[0].cells).index("moved")
    assert list(compared.columns[1].cells)[row] == str(metrics.moved)


def test_what_sequences_wait_for_a_place_in_the_batch_is_said_by_pool() -> None:
    simulated = mesh(pool("prefill"), pool("decode", instance={"max_decode_batch": 1}))
    cluster = run(simulated, (0.0, 100, 51), (0.0, 100, 51))
    # Somebody decodes fifty steps of some 20 ms while the other one waits.
    [line] = [line for line in summary_of(measure(cluster)) if "decode batch" in line]
    assert line.startswith("from a sequence's offer until it is in a decode batch: ")
    assert 400 < float(line.split(": ")[1].split(" ms at decode")[0]) < 600
