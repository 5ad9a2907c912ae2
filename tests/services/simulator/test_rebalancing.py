"""Sequences leave a simulated instance that is running out of memory, as live ones do."""

import pytest

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
    assert (cluster.scheduler.asked_to_leave > 0) == is_on
