"""Simulated meshes that grow and shrink: by wish, and as the live scheduler plans."""

from typing import Any

import pytest

from common.errors import ConfigError
from common.ids import InstanceId
from services.simulator.cluster import Cluster
from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import mesh, pool, run


def steady(requests: int, every_s: float, output_tokens: int = 80) -> list[Offered]:
    return [Offered(number * every_s, 300, output_tokens) for number in range(requests)]


def step(at_s: float, name: str, count: int) -> dict[str, Any]:
    return {"at_s": at_s, "pool": name, "count": count}


def _lives(cluster: Cluster) -> dict[str, tuple[float, float | None]]:
    return {each.instance_id: (each.began_s, each.ended_s) for each in cluster.lives}


def test_one_more_is_ready_when_its_start_is_over_and_is_given_work() -> None:
    simulated = mesh(pool("prefill"), pool("decode", start_s=2.0), scale=[step(1.0, "decode", 2)])
    cluster = simulate(simulated, Load(steady(100, 0.1)))
    assert _lives(cluster)["decode-1"] == (3.0, None)
    assert cluster.instances[InstanceId("decode-1")].decode.drawing.rows > 500
    metrics = measure(cluster).pools[1]
    assert (metrics.instances, metrics.deaths) == (2, 0)
    # Its devices are paid for while it starts.
    ended_s = max(cluster.records.end_s)
    assert metrics.mean_instances == pytest.approx(1 + (ended_s - 1.0) / ended_s)


def test_one_that_is_too_many_finishes_what_it_has_and_takes_nothing_new() -> None:
    simulated = mesh(pool("prefill"), pool("decode", 2), scale=[step(2.0, "decode", 1)])
    cluster = simulate(simulated, Load(steady(100, 0.1)))
    began_s, ended_s = _lives(cluster)["decode-1"]
    assert (began_s, cluster.former[0].has_died) == (0.0, False)
    assert ended_s is not None
    assert 2.0 < ended_s < 2.0 + 80 * 0.025
    assert set(cluster.records.attempts) == {1}
    assert [each.instance_id for each in cluster.former] == ["decode-1"]


def test_what_a_drain_does_not_finish_goes_on_elsewhere() -> None:
    simulated = mesh(
        pool("prefill"), pool("decode", 2), mesh={"drain_timeout_s": 1.0}, scale=[step(2.0, "decode", 1)]
    )
    cluster = run(simulated, (0.0, 300, 500), (0.1, 300, 500))
    assert sorted(cluster.records.attempts) == [1, 2]
    assert _lives(cluster)["decode-1"][1] == pytest.approx(3.0)
    assert list(cluster.records.drawn_tokens) == [500, 500]


def test_new_ones_are_ready_before_old_ones_end() -> None:
    pools = (pool("prefill"), pool("decode", start_s=3.0))
    steps = [step(1.0, "decode", 2), step(10.0, "decode", 0), step(10.0, "decode", 1)]
    cluster = simulate(mesh(*pools, scale=steps), Load(steady(200, 0.1), retries=100))
    lives = _lives(cluster)
    assert lives["decode-1"][0] == 4.0
    assert lives["decode-2"] == (13.0, None)
    assert {each for each, (_, ended_s) in lives.items() if ended_s is not None} == {"decode-0", "decode-1"}


def test_an_instance_that_dies_while_it_drains_is_gone_and_stays_away() -> None:
    death = {"kind": "death", "instance": "decode-1", "at_s": 2.5, "lasts_s": 1.0}
    simulated = mesh(pool("prefill"), pool("decode", 2), scale=[step(2.0, "decode", 1)], fault=[death])
    cluster = run(simulated, (0.0, 300, 300), (0.1, 300, 300))
    assert [(each.instance_id, each.has_died) for each in cluster.former] == [("decode-1", True)]
    assert set(cluster.instances) == {"prefill-0", "decode-0"}
    assert cluster.staff.terms[InstanceId("decode-1")].ended_s == 2.5


def test_one_that_is_started_later_may_be_the_one_that_dies() -> None:
    death = {"kind": "death", "instance": "decode-1", "at_s": 5.0}
    simulated = mesh(pool("prefill"), pool("decode"), scale=[step(2.0, "decode", 2)], fault=[death])
    cluster = simulate(simulated, Load(steady(60, 0.1)))
    assert _lives(cluster)["decode-1"] == (2.0, 5.0)


PLANNED: dict[str, Any] = {
    "scaling": {
        "policy": "on",
        "window_s": 5.0,
        "up_cooldown_s": 5.0,
        "down_after_s": 40.0,
        "max_prefill": 4,
        "max_decode": 6,
    },
    "objectives": {"ttft_s": 0.5, "tpot_s": 0.03},
}


def _rush() -> list[Offered]:
    """A minute of little, half a one of much, and little again."""
    calm = [Offered(0.5 * number, 300, 100) for number in range(120)]
    rush = [Offered(60 + 0.03 * number, 300, 100) for number in range(1000)]
    return [*calm, *rush, *(Offered(90 + 0.5 * number, 300, 100) for number in range(240))]


def test_the_live_plan_grows_and_shrinks_a_mesh_with_its_load() -> None:
    pools = (pool("prefill", start_s=4.0), pool("decode", start_s=4.0, instance={"max_decode_batch": 32}))
    cluster = simulate(mesh(*pools, **PLANNED), Load(_rush()))
    changes = cluster.history.changes
    started_s = [change.at_s for change in changes if change.kind == "start"]
    left_s = [change.at_s for change in changes if change.kind == "leave"]
    assert 60 < started_s[0] < 75
    assert left_s[0] > 90 + 40
    assert max(started_s) < min(left_s)
    decodes = measure(cluster).pools[1]
    assert decodes.instances > 1
    assert 1 < decodes.mean_instances < decodes.instances
    again = simulate(mesh(*pools, **PLANNED), Load(_rush()))
    assert again.records.digest() == cluster.records.digest()


def test_a_start_that_takes_longer_helps_later() -> None:
    attained = []
    for start_s in (1.0, 30.0):
        pools = (
            pool("prefill", start_s=start_s),
            pool("decode", start_s=start_s, instance={"max_decode_batch": 32}),
        )
        cluster = simulate(mesh(*pools, **PLANNED), Load(_rush()))
        end_to_end = measure(cluster).end_to_end
        assert end_to_end is not None
        attained.append(end_to_end.p99_s)
    assert attained[0] < attained[1]


def test_a_plan_that_is_only_looked_at_changes_nothing() -> None:
    planned = PLANNED | {"scaling": PLANNED["scaling"] | {"policy": "dry_run"}}
    cluster = simulate(mesh(pool("prefill"), pool("decode"), **planned), Load(_rush()[:500]))
    assert not cluster.history.changes


@pytest.mark.parametrize(
    ("given", "key", "rule"),
    [
        (step(1.0, "attic", 1), "scale.0.pool", "must be one of"),
        (step(-1.0, "decode", 1), "scale.0.at_s", "0 or more"),
        (step(1.0, "decode", -1), "scale.0.count", "0 or more"),
        ({"at_s": 1.0, "pool": "decode"}, "scale.0.count", "must be given"),
    ],
)
def test_a_step_that_makes_no_sense_is_an_error(given: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        mesh(pool("prefill"), pool("decode"), scale=[given])
    assert caught.value.key == key


def test_a_start_before_the_wish_is_an_error() -> None:
    with pytest.raises(ConfigError, match="0 or more") as caught:
        mesh(pool("prefill"), pool("decode", start_s=-1.0))
    assert caught.value.key == "pool.decode.start_s"
