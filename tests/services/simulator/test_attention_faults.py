"""Attention workers that die, hang, are slow or cut off: decode instances wait, then give them up as live."""

from typing import Any

import pytest

from common.errors import ConfigError
from decode.attention_needs import ANSWER_TIMEOUT_S
from scheduler.membership import SEEN_AFTER_S
from services.simulator.cluster import Cluster, make_cluster
from services.simulator.config import Simulated
from services.simulator.decode_room import DecodeRoom
from services.simulator.instance import SimulatedInstance
from services.simulator.life import begin_life
from services.simulator.metrics import measure
from services.simulator.run import Load, simulate
from tests.services.simulator.meshes import assert_same_times, run
from tests.services.simulator.test_attention import MODES, remote
from tests.services.simulator.test_faults import steady

AT_S = 0.5
SHARE = 0.1
ALONE = (0.0, 64, 200)
LINK_BYTES_PER_S = 2e6
"""Slow enough to be felt."""


def befallen(*faults: dict[str, Any], partition: str = "heads", **keys: Any) -> Simulated:
    return remote(partition, fault=list(faults), **keys)


def fault(kind: str, at_s: float = AT_S, instance: str = "attention-0", **keys: Any) -> dict[str, Any]:
    return {"kind": kind, "instance": instance, "at_s": at_s} | keys


def end_s(simulated: Simulated) -> float:
    return float(run(simulated, ALONE).records.end_s[0])


def decode_of(cluster: Cluster) -> SimulatedInstance:
    [instance] = [each for each in cluster.instances.values() if each.pools is not None]
    return instance


def test_a_slow_worker_is_one_whose_attention_takes_as_much_longer() -> None:
    slow_for_good = {"per_context_token_s": 4e-3, "per_sequence_s": 0.0, "step_s": 0.0, "kind": "linear"}
    fine = slow_for_good | {"per_context_token_s": 1e-3}
    fault_of = {"kind": "straggler", "pool": "attention", "at_s": 0.0, "times": 4.0}
    slowed = remote(workers={"performance": fine}, fault=[fault_of])
    built_so = remote(workers={"performance": slow_for_good})
    assert end_s(slowed) == pytest.approx(end_s(built_so), rel=1e-9)
    assert end_s(slowed) > 2 * end_s(remote(workers={"performance": fine}))


def test_a_worker_over_a_slow_link_is_one_with_less_bandwidth() -> None:
    fine, less = LINK_BYTES_PER_S, SHARE * LINK_BYTES_PER_S
    slowed = remote(
        workers={"link_bytes_per_s": fine},
        fault=[{"kind": "slow_link", "pool": "attention", "at_s": 0.0, "share": SHARE}],
    )
    assert end_s(slowed) == pytest.approx(end_s(remote(workers={"link_bytes_per_s": less})), rel=1e-9)
    assert end_s(slowed) > 1.1 * end_s(remote(workers={"link_bytes_per_s": fine}))


def test_an_instance_over_a_slow_link_reaches_its_workers_as_slowly() -> None:
    fine, less = LINK_BYTES_PER_S, SHARE * LINK_BYTES_PER_S
    cut = fault("slow_link", at_s=0.0, instance="decode-0", share=SHARE)
    slowed = befallen(cut, link_bytes_per_s=fine)
    assert end_s(slowed) == pytest.approx(end_s(remote(link_bytes_per_s=less)), rel=1e-9)


def test_what_is_slow_for_a_while_costs_what_was_slow_of_it() -> None:
    """Steps that are under way change their pace."""
    slow = {"per_context_token_s": 1e-3, "per_sequence_s": 0.0, "step_s": 0.0, "kind": "linear"}
    fine_s, half_s = (
        end_s(remote(workers={"performance": slow}, fault=faults))
        for faults in ([], [fault("straggler", times=3.0, lasts_s=3.0)])
    )
    assert fine_s + 0.5 < half_s < fine_s + 3.0


@pytest.mark.parametrize("kind", ["silence", "slow_link"])
def test_who_hangs_for_a_moment_costs_a_moment(kind: str) -> None:
    keys: dict[str, Any] = {"share": 0.0} if kind == "slow_link" else {}
    hanging = befallen(fault(kind, lasts_s=1.25, **keys))
    cluster = run(hanging, ALONE)
    assert cluster.gateway.continuations == 0
    assert cluster.records.end_s[0] == pytest.approx(end_s(remote()) + 1.25, rel=1e-9)
    assert cluster.records.slowest_gap_s[0] == pytest.approx(1.25, abs=0.05)


@pytest.mark.parametrize("kind", ["silence", "slow_link"])
def test_who_hangs_for_long_is_given_up_and_bound_anew_once_it_answers(kind: str) -> None:
    keys: dict[str, Any] = {"share": 0.0} if kind == "slow_link" else {}
    cluster = run(befallen(fault(kind, lasts_s=4.0, **keys)), ALONE)
    assert cluster.gateway.continuations >= 1
    assert measure(cluster).done == 1
    assert len(decode_of(cluster).blocks.open_pools) == 1
    # Its first token anew is prefill's.
    assert ANSWER_TIMEOUT_S < cluster.records.slowest_gap_s[0] < 4.0
    assert cluster.records.second_token_s[0] < AT_S + 4.0 < cluster.records.end_s[0]


def test_an_instance_that_is_cut_off_gives_its_workers_up_and_binds_them_anew() -> None:
    cut = fault("slow_link", instance="decode-0", share=0.0, lasts_s=4.0)
    cluster = run(befallen(cut), ALONE)
    assert cluster.gateway.continuations >= 1
    assert (measure(cluster).done, len(decode_of(cluster).blocks.open_pools)) == (1, 1)


@pytest.mark.parametrize("of_host", [True, False])
@pytest.mark.parametrize("partition", ["heads", "requests"])
def test_sequences_of_a_worker_that_died_go_on_elsewhere(partition: str, of_host: bool) -> None:
    """As soon as its process's end was seen, or, where its host is gone with it, once its silence was noticed
    amid a step. By requests the other pools' are not concerned."""
    count = 4 if partition == "requests" else 2
    simulated = befallen(
        fault("death", 1.5, "attention-1", of_host=of_host),
        partition=partition,
        count=count,
        workers={"count": count + (partition == "heads")},
    )
    cluster = run(simulated, *[(0.01 * number, 200, 150) for number in range(40)])
    assert cluster.gateway.continuations > 0
    assert cluster.gateway.causes["kv_lost"] > 0
    assert (cluster.gateway.continuations < 40) == (partition == "requests")
    assert measure(cluster).done == 40
    records = cluster.records
    broken = [number for number in range(40) if records.attempts[number] > 1]
    slowest_s = [records.slowest_gap_s[number] for number in broken]
    if of_host:
        assert min(slowest_s) > ANSWER_TIMEOUT_S
    else:
        assert SEEN_AFTER_S < min(slowest_s) <= max(slowest_s) < ANSWER_TIMEOUT_S


def test_without_a_worker_in_reserve_sequences_wait_for_its_next_life() -> None:
    cluster = run(befallen(fault("death", lasts_s=8.0)), ALONE)
    assert measure(cluster).done == 1
    assert cluster.records.slowest_gap_s[0] > 8.0 - ANSWER_TIMEOUT_S - 0.1
    assert len(decode_of(cluster).blocks.open_pools) == 1


@pytest.mark.parametrize(("of_host", "missed_s"), [(True, 3.0), (False, SEEN_AFTER_S)])
def test_one_that_died_while_nobody_used_it_is_missed_once_its_end_is_known(
    of_host: bool, missed_s: float
) -> None:
    """At once, or a lease after its host was gone with it."""
    death = fault("death", at_s=10.0, of_host=of_host)
    cluster = run(befallen(death), (0.0, 64, 10), (14.0, 64, 10), retries=3)
    assert not decode_of(cluster).blocks.open_pools
    assert int(cluster.records.attempts[0]) == 1
    assert measure(cluster).done == 1
    watched = make_cluster(befallen(death), is_exact=True)
    watched.start()
    begin_life(watched, 0)
    watched.clock.run_until(10.0 + missed_s - 0.001)
    assert len(decode_of(watched).blocks.open_pools) == 1
    watched.clock.run_until(10.0 + missed_s + 0.001)
    assert not decode_of(watched).blocks.open_pools


def test_a_life_that_was_short_is_missed_a_lease_after_its_own_end() -> None:
    """Dead with its host at 10 and, back for a second, at 12: until 15 its user waits for it."""
    deaths = [fault("death", at_s=10.0, lasts_s=1.0, of_host=True), fault("death", at_s=12.0, of_host=True)]
    cluster = make_cluster(befallen(*deaths), is_exact=True)
    cluster.start()
    begin_life(cluster, 0)
    cluster.clock.run_until(11.5)
    assert len(decode_of(cluster).blocks.open_pools) == 1
    cluster.clock.run_until(14.9)
    assert len(decode_of(cluster).blocks.open_pools) == 1
    cluster.clock.run_until(15.1)
    assert not decode_of(cluster).blocks.open_pools


FAULTS = (
    {"kind": "death", "pool": "attention", "mean_between_s": 30.0, "lasts_s": 3.0},
    {"kind": "straggler", "pool": "attention", "mean_between_s": 6.0, "times": 5.0, "lasts_s": 1.0},
    {"kind": "slow_link", "pool": "attention", "mean_between_s": 20.0, "share": 0.0, "lasts_s": 2.0},
    {"kind": "slow_link", "pool": "decode", "mean_between_s": 25.0, "share": 0.0, "lasts_s": 2.0},
    {"kind": "silence", "pool": "attention", "mean_between_s": 20.0, "lasts_s": 2.0},
    {"kind": "death", "pool": "decode", "mean_between_s": 30.0, "lasts_s": 2.0},
)


@pytest.mark.parametrize("partition", ["heads", "requests"])
@pytest.mark.parametrize(("pipeline", "batches"), MODES[:2] + MODES[-1:])
def test_whatever_befalls_workers_every_request_ends_and_nothing_is_kept(
    partition: str, pipeline: str, batches: int
) -> None:
    """``simulate`` holds each run to its conservation laws."""
    simulated = remote(partition, pipeline, batches, workers={"count": 4}, fault=list(FAULTS))
    load = Load(steady(60, 0.2), retries=40)
    first, again = simulate(simulated, load, seed=3), simulate(simulated, load, seed=3)
    metrics = measure(first)
    assert first.records.digest() == again.records.digest()
    assert metrics.done + metrics.rejected + metrics.failed == 60
    assert metrics.done > 10
    assert metrics.continued > 0


@pytest.mark.parametrize("partition", ["heads", "requests"])
def test_steps_in_one_event_take_what_single_steps_take_whatever_befalls(
    partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated, load = befallen(*FAULTS[1:], partition=partition), Load(steady(20, 0.4), retries=40)
    skipped = simulate(simulated, load, seed=2)
    monkeypatch.setattr(DecodeRoom, "steps_ahead", lambda room, lane=0: 1)
    singly = simulate(simulated, load, seed=2)
    assert_same_times(skipped, singly)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"instance": "attention-2"}, "fault.0.instance"),
        ({"pool": "workers"}, "fault.0.pool"),
    ],
)
def test_workers_that_are_not_there_are_refused_by_name(given: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        remote(fault=[{"kind": "silence", "at_s": 1.0, "lasts_s": 1.0} | given])
