"""Late in a long run, where the time is rounded by more, everything ends as it does at its begin."""

import random
from typing import Any

import pytest

import services.simulator.run
from services.simulator.cluster import Cluster, make_cluster
from services.simulator.config import Simulated
from tests.services.simulator.meshes import SHAPE, mesh, pool, run

LATE_S = 4e6
"""46 days: known to half a nanosecond, of steps that take milliseconds."""
DEEP = {
    "shape": SHAPE | {"layers": 64, "heads": 8, "kv_heads": 8, "head_dim": 128},
    "link_bytes_per_s": 1e10,
}
"""From 512 tokens on each of its layers is worth a report, and is sent before the next one is there."""
BY_LAYERS = {"layerwise_min_tokens": 1}


def over_workers(partition: str, pipeline: str, **sections: Any) -> Simulated:
    instance = {"attention_workers": 2, "attention_partition": partition, "pipeline": pipeline}
    decode = pool("decode", kv_tokens=None, instance=instance)
    return mesh(pool("prefill"), decode, pool("attention", 2), **sections)


MESHES = {
    "coupled": mesh(pool("mixed", 2)),
    "coupled, on one machine": mesh(pool("mixed", 2), host={"cores": 2, "token_s": 1e-3}),
    "layer by layer": mesh(pool("prefill"), pool("decode"), cluster=DEEP, transfer=BY_LAYERS),
    "layer by layer, on one machine": mesh(
        pool("prefill"),
        pool("decode"),
        cluster=DEEP,
        transfer=BY_LAYERS,
        host={"cores": 1, "token_s": 1e-3},
    ),
    "layer by layer, of two stages": mesh(
        pool("prefill", pipeline=2), pool("decode", pipeline=2), cluster=DEEP, transfer=BY_LAYERS
    ),
    "heads": over_workers("heads", "off"),
    "requests, by turns": over_workers("requests", "rotational"),
    "requests, a replica each": over_workers("requests", "fixed"),
    "heads, on one machine": over_workers("heads", "rotational", host={"cores": 2, "token_s": 1e-3}),
}


def latencies(cluster: Cluster) -> list[float]:
    records = cluster.records
    ends = zip(records.arrival_s, records.first_token_s, records.end_s, strict=True)
    return [each for arrival_s, first_s, end_s in ends for each in (first_s - arrival_s, end_s - first_s)]


@pytest.mark.parametrize("name", MESHES)
def test_what_comes_late_takes_as_long_as_what_comes_early(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chance = random.Random(1)
    load = [(0.3 * number, chance.randint(50, 900), chance.randint(2, 60)) for number in range(40)]
    early = run(MESHES[name], *load)

    def make_late(*args: Any, **keys: Any) -> Cluster:
        cluster = make_cluster(*args, **keys)
        cluster.clock.now = LATE_S
        return cluster

    monkeypatch.setattr(services.simulator.run, "make_cluster", make_late)
    late = run(MESHES[name], *[(LATE_S + arrival_s, prompt, output) for arrival_s, prompt, output in load])
    assert latencies(late) == pytest.approx(latencies(early), abs=1e-5)
