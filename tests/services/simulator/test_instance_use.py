"""What is said of each instance of a simulated mesh."""

import math

import msgspec
import pytest

from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, simulate
from services.simulator.tables import pool_table
from tests.services.simulator.meshes import mesh, pool, run


def loaded(requests: int) -> Load:
    return Load([Offered(0.05 * number, 200 + 7 * number % 90, 60) for number in range(requests)])


def test_a_pools_instances_have_done_together_what_the_pool_did() -> None:
    metrics = measure(simulate(mesh(pool("prefill", 2), pool("decode", 3)), loaded(120)))
    assert [each.name for each in metrics.instances] == [
        *(f"prefill-{number}" for number in range(2)),
        *(f"decode-{number}" for number in range(3)),
    ]
    for whole in metrics.pools:
        parts = [each for each in metrics.instances if each.pool == whole.name]
        assert len(parts) == whole.instances
        assert sum(each.chunk_tokens for each in parts) == whole.chunk_tokens
        assert sum(each.decode_steps for each in parts) == whole.decode_steps
        assert max(each.kv_peak for each in parts) == whole.kv_peak
        # All were there all the time.
        assert math.fsum(each.busy for each in parts) / len(parts) == pytest.approx(whole.busy)
        assert math.fsum(each.prefill_busy for each in parts) / len(parts) == pytest.approx(
            whole.prefill_busy
        )
        rows = math.fsum(each.batch * each.decode_steps for each in parts)
        assert rows == pytest.approx(whole.batch * whole.decode_steps)


def test_who_had_all_the_work_is_told_from_who_had_none() -> None:
    """One request: one of both decode instances draws it. The table shows both ends."""
    metrics = measure(run(mesh(pool("prefill"), pool("decode", 2)), (0.0, 300, 100)))
    prompts, *tokens = metrics.instances
    idle, busy = sorted(tokens, key=lambda each: each.busy)
    assert (prompts.chunk_tokens, prompts.decode_steps) == (300, 0)
    assert (idle.busy, idle.decode_steps, idle.batch, idle.kv_peak) == (0.0, 0, 0.0, 0.0)
    assert (busy.decode_steps, busy.batch, busy.chunk_tokens) == (99, 1.0, 0)
    assert prompts.prefill_busy == prompts.busy
    assert prompts.busy + busy.busy == pytest.approx(1.0, abs=0.01)
    shown = list(pool_table(metrics).columns[4].cells)
    assert shown == [f"{100 * prompts.busy:.0f}, {prompts.busy:.0%}", f"0, {busy.busy:.0%}"]


def test_lives_of_one_instance_count_together() -> None:
    death = {"kind": "death", "instance": "decode-0", "at_s": 1.0, "lasts_s": 0.5}
    cluster = run(mesh(pool("prefill"), pool("decode"), fault=[death]), (0.0, 300, 100))
    metrics = measure(cluster)
    found = {each.name: each for each in metrics.instances}
    assert {name: each.lives for name, each in found.items()} == {"prefill-0": 1, "decode-0": 2}
    assert found["decode-0"].decode_steps == metrics.pools[1].decode_steps
    assert found["decode-0"].busy == metrics.pools[1].busy


def test_as_json_they_are_beside_the_pools() -> None:
    metrics = measure(run(mesh(pool("mixed", 2)), (0.0, 300, 5), (0.0, 100, 5)))
    written = msgspec.json.decode(msgspec.json.encode(metrics))
    assert [(each["name"], each["pool"], each["lives"]) for each in written["instances"]] == [
        ("mixed-0", "mixed", 1),
        ("mixed-1", "mixed", 1),
    ]
    assert sum(each["chunk_tokens"] for each in written["instances"]) == 400


@pytest.mark.parametrize(("requests", "output_tokens"), [(1, 1000), (8, 400), (4, 500)])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_what_steps_took_of_the_memory_is_seen_though_they_are_one_event(
    requests: int, output_tokens: int, pipeline: int
) -> None:
    """All draw as many, so that nothing is free before the last step has ended."""
    mixed = pool("mixed", kv_tokens=6400, pipeline=pipeline)
    [used] = measure(run(mesh(mixed), *[(0.0, 16, output_tokens)] * requests)).pools
    # The last token's KV is never needed.
    assert used.kv_peak == pytest.approx(requests * -(-(16 + output_tokens - 1) // 16) / 400)


def test_links_are_as_busy_as_those_were_that_were_there() -> None:
    load = [(0.5 * number, 200, 20) for number in range(40)]
    pools, slow = (pool("prefill"), pool("decode", start_s=1000.0)), {"link_bytes_per_s": 1e6}
    coming = [{"at_s": 0.0, "pool": "decode", "count": 5}]
    few, more = (
        measure(run(mesh(*pools, cluster=slow, scale=scale), *load)).pools[1] for scale in ([], coming)
    )
    assert few.link_in > 0.1
    assert more.mean_instances == pytest.approx(5)
    assert more.link_in == pytest.approx(few.link_in)
