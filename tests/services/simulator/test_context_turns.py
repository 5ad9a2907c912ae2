"""Decodes that take turns, as a step's contexts are bounded: what their clients see of it."""

import pytest

from services.simulator.metrics import measure
from tests.services.simulator.meshes import mesh, pool, run


def test_gaps_are_of_each_sequence_where_these_take_turns() -> None:
    """Two of eight are in a step at once: a token every fourth, of 24 ms."""
    pools = pool("prefill", 4), pool("decode")
    requests = [(0.0, 200, 101)] * 8
    turned = run(mesh(*pools, instance={"max_step_context_tokens": 700}), *requests)
    together = run(mesh(*pools), *requests)
    for cluster in (turned, together):
        metrics = measure(cluster)
        assert metrics.tpot is not None
        gaps = sum(sum(each.decode.drawing.gaps.counts.values()) for each in cluster.instances.values())
        # The first of each, from its prompt's token, is the gateway's.
        assert gaps == 8 * 99
        assert metrics.tbt_s[0] == pytest.approx(metrics.tpot.p50_s, rel=0.2)
        assert max(cluster.records.slowest_gap_s) >= 0.98 * metrics.tbt_s[-1]
    one, other = measure(turned), measure(together)
    assert one.tpot is not None
    assert other.tpot is not None
    assert one.tpot.mean_s > 2 * other.tpot.mean_s
    paces = [each.decode.drawing.step_s for each in turned.instances.values() if each.role == "decode"]
    assert paces == [pytest.approx(one.tbt_s[0], rel=0.5)]
