"""Simulated meshes whose instances die, are slow or silent, and whose links fail: nothing is lost."""

from typing import Any

import pytest

from common.errors import ConfigError, NoInstanceReady
from common.ids import InstanceId
from gateway.continuing import WAITS_S
from scheduler.kv_links import FIRST_BACKOFF_S
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.decode_room import DecodeRoom
from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import TOKEN_BYTES, assert_same_times, mesh, pool, run

LEASE_S = 3.0
"""As ``[mesh]`` has it."""


def steady(requests: int, every_s: float, prompt_tokens: int = 300, output_tokens: int = 80) -> list[Offered]:
    return [Offered(number * every_s, prompt_tokens, output_tokens) for number in range(requests)]


def befallen(*faults: dict[str, Any], pools: tuple[dict[str, Any], ...] = (), **sections: Any) -> Simulated:
    return mesh(*(pools or (pool("prefill", 2), pool("decode", 3))), fault=list(faults), **sections)


def simulate_twice(simulated: Simulated, load: Load) -> Cluster:
    """``simulate`` holds each run to its conservation laws."""
    first, again = simulate(simulated, load, seed=5), simulate(simulated, load, seed=5)
    assert first.records.digest() == again.records.digest()
    return first


FAULTS: dict[str, tuple[dict[str, Any], ...]] = {
    "a decode instance dies for good": ({"kind": "death", "instance": "decode-1", "at_s": 2.0},),
    "a prefill instance dies and comes back": (
        {"kind": "death", "instance": "prefill-0", "at_s": 2.0, "lasts_s": 1.0},
    ),
    "all decode instances die at once": ({"kind": "death", "pool": "decode", "at_s": 2.0, "lasts_s": 5.0},),
    "everything dies now and then": (
        {"kind": "death", "pool": "decode", "mean_between_s": 4.0, "lasts_s": 2.0},
        {"kind": "death", "pool": "prefill", "mean_between_s": 4.0, "lasts_s": 0.5},
    ),
    "a straggler": (
        {"kind": "straggler", "instance": "decode-0", "at_s": 1.0, "times": 4.0, "lasts_s": 3.0},
    ),
    "stragglers now and then": (
        {"kind": "straggler", "pool": "decode", "mean_between_s": 2.0, "times": 3.0, "lasts_s": 1.0},
        {"kind": "straggler", "pool": "prefill", "mean_between_s": 2.0, "times": 3.0, "lasts_s": 1.0},
    ),
    "a link that is cut": (
        {"kind": "slow_link", "instance": "prefill-0", "at_s": 1.0, "share": 0.0, "lasts_s": 2.0},
    ),
    "a link that is cut for good": (
        {"kind": "slow_link", "instance": "prefill-0", "at_s": 1.0, "share": 0.0},
    ),
    "nobody hears them": ({"kind": "silence", "pool": "decode", "mean_between_s": 4.0, "lasts_s": 4.0},),
    "all of it": (
        {"kind": "death", "pool": "decode", "mean_between_s": 6.0, "lasts_s": 2.0},
        {"kind": "death", "pool": "prefill", "mean_between_s": 8.0, "lasts_s": 4.0},
        {"kind": "straggler", "pool": "decode", "mean_between_s": 2.0, "times": 3.0, "lasts_s": 1.0},
        {"kind": "slow_link", "pool": "prefill", "mean_between_s": 2.0, "share": 0.0, "lasts_s": 1.0},
        {"kind": "silence", "pool": "prefill", "mean_between_s": 5.0, "lasts_s": 4.0},
    ),
}

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "pools": {"cluster": {"link_bytes_per_s": 1e7}},
    "messages and memory": {
        "pools": (pool("prefill", 2, kv_tokens=3000), pool("decode", 3, kv_tokens=3000)),
        "cluster": {"link_bytes_per_s": 3e6, "hop_s": 0.003, "link_latency_s": 0.001},
        "transfer": {"layerwise_min_tokens": 1},
    },
    "mixed beside them": {
        "pools": (pool("prefill"), pool("decode"), pool("mixed", 2, kv_tokens=4000)),
        "cluster": {"link_bytes_per_s": 1e7},
    },
    "pipelines": {
        "pools": (pool("prefill", 2, pipeline=2), pool("decode", 3, pipeline=2)),
        "cluster": {"link_bytes_per_s": 1e7},
    },
    "deferred, with a plan for roles": {
        "scheduler": {"prefill_policy": "deferred"},
        "roles": {"policy": "overflow", "overflow_queue_s": 0.05, "cool_down_s": 0.2, "settle_s": 0.5},
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_befalls_it_every_request_ends_and_nothing_is_kept(name: str) -> None:
    _check_ends(befallen(*FAULTS[name], **ARRANGEMENTS["pools"]))


CUT_S = 1.0
DEADLINE_S = 60.0
SUSPECT_AFTER_S = 2.0
"""As ``[transfer]`` has them."""


def test_an_instance_whose_link_is_cut_is_given_no_more_once_a_transfer_takes_long() -> None:
    """As docs/simulator.md says. What it was given before goes on elsewhere."""
    cut = FAULTS["a link that is cut for good"]
    cluster = simulate(befallen(*cut, **ARRANGEMENTS["pools"]), Load(steady(100, 0.06), retries=20), seed=5)
    records, metrics = cluster.records, measure(cluster)
    assert (metrics.done, metrics.failed) == (100, 0)
    broken = [number for number in range(100) if records.attempts[number] > 1]
    assert len(broken) == 34
    assert {records.attempts[number] for number in broken} == {2}
    assert max(records.arrival_s[number] for number in broken) < CUT_S + SUSPECT_AFTER_S
    assert {cluster.network.names[records.prefill[number]] for number in broken} == {"prefill-1"}
    assert all(records.second_token_s[number] > CUT_S + DEADLINE_S for number in broken)


def test_a_link_that_carries_again_is_used_again() -> None:
    """One request tries it, after a while."""
    cut = {"kind": "slow_link", "instance": "prefill-0", "at_s": CUT_S, "share": 0.0, "lasts_s": 6.0}
    simulated = befallen(cut, **ARRANGEMENTS["pools"], transfer={"deadline_s": 1.0})
    cluster = simulate(simulated, Load(steady(500, 0.06), retries=20), seed=5)
    records = cluster.records
    assert measure(cluster).failed == 0
    placed = [
        records.arrival_s[number]
        for number in range(500)
        if cluster.network.names[records.prefill[number]] == "prefill-0"
    ]
    avoided = [arrival_s for arrival_s in placed if CUT_S < arrival_s < CUT_S + 6.0]
    assert not avoided, "its last placement is of who went on elsewhere"
    late_s = CUT_S + 6.0 + 2 * FIRST_BACKOFF_S
    assert len([each for each in placed if each > late_s]) > 100
    assert not cluster.schedulers.leader.state.links.broken


@pytest.mark.parametrize("instance", ["prefill-0", "decode-0"])
def test_where_nobody_else_is_there_a_cut_link_is_used_nevertheless(instance: str) -> None:
    cut = {"kind": "slow_link", "instance": instance, "at_s": CUT_S, "share": 0.0, "lasts_s": 4.0}
    pools = (pool("prefill"), pool("decode"))
    simulated = befallen(cut, pools=pools, transfer={"deadline_s": 3.0}, cluster={"link_bytes_per_s": 1e7})
    metrics = measure(simulate_twice(simulated, Load(steady(50, 0.1), retries=20)))
    assert (metrics.done, metrics.failed) == (50, 0)


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS.keys() - {"pools"}))
def test_whatever_is_arranged_all_of_it_may_befall(arrangement: str) -> None:
    _check_ends(befallen(*FAULTS["all of it"], **ARRANGEMENTS[arrangement]))


def _check_ends(simulated: Simulated) -> None:
    metrics = measure(simulate_twice(simulated, Load(steady(100, 0.06), retries=20)))
    assert metrics.done + metrics.rejected + metrics.failed == metrics.requests == 100
    assert metrics.done > 10


@pytest.mark.parametrize("name", ["everything dies now and then", "stragglers now and then", "all of it"])
def test_steps_in_one_event_take_what_single_steps_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated, load = befallen(*FAULTS[name], **ARRANGEMENTS["pools"]), Load(steady(30, 0.2))
    skipped = simulate(simulated, load, seed=2)
    monkeypatch.setattr(DecodeRoom, "steps_ahead", lambda room, lane=0: 1)
    singly = simulate(simulated, load, seed=2)
    assert_same_times(skipped, singly)


def death(instance: str, at_s: float, lasts_s: float | None = None) -> dict[str, Any]:
    """With its host."""
    given = {"kind": "death", "instance": instance, "at_s": at_s, "of_host": True}
    return given if lasts_s is None else given | {"lasts_s": lasts_s}


def coming_while_nobody_decodes(away_s: float, retries: int = 0, **sections: Any) -> Cluster:
    """Half a second after the only decode instance has died."""
    pools, died = (pool("prefill"), pool("decode")), death("decode-0", 1.0, away_s) | {"of_host": False}
    return simulate_twice(
        befallen(died, pools=pools, **sections), Load([Offered(1.5, 300, 5)], retries=retries)
    )


def test_who_comes_while_nobody_is_there_waits_for_the_next_life() -> None:
    cluster = coming_while_nobody_decodes(4.0)
    metrics, records = measure(cluster), cluster.records
    assert (metrics.done, metrics.rejected, metrics.continued) == (1, 0, 0)
    assert 3.5 < records.first_token_s[0] - 1.5 < 3.5 + 1.1 * WAITS_S[-1]
    assert 6 <= records.attempts[0] <= 9


@pytest.mark.parametrize("most_s", [0.0, 2.0])
def test_and_is_rejected_where_nobody_comes_for_as_long_as_it_waits(most_s: float) -> None:
    cluster = coming_while_nobody_decodes(4.0, gateway={"wait_for_instance_s": most_s})
    [refusal] = measure(cluster).refusals
    assert (refusal.code, refusal.requests) == (NoInstanceReady.code, 1)
    assert most_s <= cluster.records.end_s[0] - 1.5 < most_s + 1.1 * WAITS_S[-1]


def test_a_client_that_asks_again_waits_as_long_again() -> None:
    cluster = coming_while_nobody_decodes(8.0, gateway={"wait_for_instance_s": 2.0}, retries=1)
    records = cluster.records
    assert measure(cluster).rejected == 1
    retry_after_s = 2.0
    assert 4.0 + retry_after_s <= records.end_s[0] - 1.5 < 4.0 + retry_after_s + 2.2 * WAITS_S[-1]


@pytest.mark.parametrize(("gone", "stays"), [("decode", "prefill"), ("prefill", "decode")])
def test_whoever_is_left_does_what_nobody_does_where_roles_may_change(gone: str, stays: str) -> None:
    """No request is lost with the last instance of a role."""
    died, roles = death(f"{gone}-0", 1.0), {"policy": "overflow", "replace_after_s": 2.0}
    pools = (pool("prefill"), pool("decode"))
    metrics = measure(simulate_twice(befallen(died, pools=pools, roles=roles), Load(steady(60, 0.1))))
    assert (metrics.done, metrics.rejected, metrics.failed) == (60, 0, 0)
    [role] = [each for each in metrics.changes if each.kind == "role"]
    assert role.instance == f"{stays}-0"
    assert role.detail.startswith(f"mixed: nobody has been there to {gone} for 2.")
    assert 3.0 < role.at_s < 3.0 + LEASE_S + 1.5


def test_a_sequence_goes_on_elsewhere_once_its_instance_has_been_silent_for_a_lease() -> None:
    """Nothing that its client has is drawn again."""
    pools = (pool("prefill"), pool("decode", 2))
    cluster = run(befallen(death("decode-0", 1.0), pools=pools), (0.0, 300, 100))
    records = cluster.records
    assert list(records.attempts) == [2]
    assert LEASE_S - 0.2 < records.slowest_gap_s[0] < LEASE_S + 1.2
    drawn = cluster.instances[InstanceId("prefill-0")].prefill.chunk_tokens - 2 * 300
    rows = {each.instance_id: each.decode.drawing.rows for each in cluster.lives}
    # Of each attempt the first token is the prompt's own.
    assert rows == {"prefill-0": 0, "decode-0": drawn - 1, "decode-1": 100 - drawn - 1}


@pytest.mark.parametrize("schedulers", [1, 3])
def test_a_sequence_goes_on_elsewhere_at_once_where_its_instances_process_is_seen_to_end(
    schedulers: int,
) -> None:
    """After word of it has come to schedulers and from these to the gateway, and the prompt is computed again
    with the tokens that were drawn."""
    pools, hop_s = (pool("prefill"), pool("decode", 2)), 0.01
    seen = death("decode-0", 1.0) | {"of_host": False}
    given = {"cluster": {"hop_s": hop_s, "schedulers": schedulers}}
    cluster = run(befallen(seen, pools=pools, **given), (0.0, 300, 100))
    records = cluster.records
    assert list(records.attempts) == [2]
    step_s, prompt_s = 0.0205, 0.01 + 1e-4 * 350
    assert 2 * hop_s < records.slowest_gap_s[0] < 12 * hop_s + prompt_s + 2 * step_s
    assert [each.instance_id for each in cluster.former] == ["decode-0"]
    state = cluster.schedulers.leader.state
    assert set(state.instances) == {"prefill-0", "decode-1"}


def test_who_comes_back_is_known_to_have_been_away_before_its_lease_is_over() -> None:
    cluster = run(
        befallen(death("decode-0", 1.0, 0.5), pools=(pool("prefill"), pool("decode"))), (0.0, 300, 100)
    )
    assert 0.5 < cluster.records.slowest_gap_s[0] < 1.0
    assert [each.record.incarnation for each in cluster.former] == ["life-2"]
    assert measure(cluster).pools[1].deaths == 1


SLOW = {"link_bytes_per_s": 300 * TOKEN_BYTES / 2.0}
"""A prompt of 300 tokens takes two seconds."""
NO_LAYERS = {"layerwise_min_tokens": 1_000_000}


def test_kv_that_was_on_its_way_from_an_instance_that_died_is_computed_elsewhere() -> None:
    given: dict[str, Any] = {"cluster": SLOW, "transfer": NO_LAYERS}
    cluster = run(
        befallen(death("prefill-0", 1.0), pools=(pool("prefill", 2), pool("decode")), **given), (0.0, 300, 5)
    )
    records = cluster.records
    assert LEASE_S - 0.2 < records.second_token_s[0] - 1.0 < LEASE_S + 1.2
    assert cluster.instances[InstanceId("prefill-1")].prefill.chunk_tokens == 301
    assert list(records.drawn_tokens) == [5]


def _second_token_s(*faults: dict[str, Any], **transfer: Any) -> float:
    pools = (pool("prefill"), pool("decode"))
    simulated = befallen(*faults, pools=pools, cluster=SLOW, transfer=NO_LAYERS | transfer)
    return run(simulated, (0.0, 300, 5)).records.second_token_s[0]


def test_a_link_that_is_cut_goes_on_with_what_was_left() -> None:
    cut = {"kind": "slow_link", "instance": "decode-0", "at_s": 1.0, "share": 0.0, "lasts_s": 3.0}
    assert _second_token_s(cut) == pytest.approx(_second_token_s() + 3.0)


def test_a_link_of_half_the_bandwidth_takes_twice_as_long() -> None:
    halves = [
        {"kind": "slow_link", "instance": name, "at_s": 0.0, "share": 0.5}
        for name in ("prefill-0", "decode-0")
    ]
    assert _second_token_s(*halves) == pytest.approx(_second_token_s() + 2.0, abs=1e-9)


def test_a_transfer_that_takes_longer_than_its_deadline_fails_and_is_tried_again() -> None:
    cut = {"kind": "slow_link", "instance": "decode-0", "at_s": 1.0, "share": 0.0, "lasts_s": 10.0}
    # The prompt, its transfer until it is given up, and the prompt again with the token that was drawn.
    assert _second_token_s(cut, deadline_s=8.0) == pytest.approx(0.04 + 8.0 + 0.0401)
    pools = (pool("prefill"), pool("decode"))
    for_good = {key: value for key, value in cut.items() if key != "lasts_s"}
    cluster = run(
        befallen(for_good, pools=pools, cluster=SLOW, transfer=NO_LAYERS | {"deadline_s": 8.0}), (0.0, 300, 5)
    )
    metrics = measure(cluster)
    assert (metrics.done, metrics.failed) == (0, 1)


def test_a_straggler_takes_so_many_times_as_long_from_its_next_step_on() -> None:
    """The step under way ends as it would have."""
    straggler = {"kind": "straggler", "instance": "decode-0", "at_s": 1.0, "times": 3.0}
    pools = (pool("prefill"), pool("decode"))
    clear = run(befallen(pools=pools), (0.0, 300, 101)).records
    slowed = run(befallen(straggler, pools=pools), (0.0, 300, 101)).records
    steps = [0.02 + 1e-4 + 1e-6 * (301 + step) for step in range(100)]
    ends = [clear.first_token_s[0] + sum(steps[: count + 1]) for count in range(100)]
    before = sum(end < 1.0 for end in ends) + 1
    assert clear.end_s[0] == pytest.approx(ends[-1])
    assert slowed.end_s[0] == pytest.approx(ends[before - 1] + 3 * sum(steps[before:]))
    assert slowed.slowest_gap_s[0] == pytest.approx(3 * steps[-1])


def test_a_straggler_that_was_slow_for_a_while_is_as_fast_again() -> None:
    fault = {"kind": "straggler", "instance": "decode-0", "at_s": 1.0, "times": 3.0, "lasts_s": 0.6}
    pools = (pool("prefill"), pool("decode"))
    clear, slowed = (
        run(befallen(*faults, pools=pools), (0.0, 300, 101)).records for faults in ((), (fault,))
    )
    # 0.6 s of it are a third of the work, to within two steps.
    assert slowed.end_s[0] - clear.end_s[0] == pytest.approx(0.4, abs=0.05)


def test_deaths_come_as_often_as_their_mean_says() -> None:
    """A mean of 20 s and 5 s away: of 4,000 s 160 lives end, give or take four deviations of 20 / 25 √160."""
    fault = {"kind": "death", "pool": "mixed", "mean_between_s": 20.0, "lasts_s": 5.0}
    simulated = befallen(fault, pools=(pool("mixed"),))
    one, same, other = (
        simulate(simulated, Load([Offered(4000.0, 10, 2)], retries=1000), seed=seed) for seed in (1, 1, 2)
    )
    ended = [each.ended_s for each in one.former if each.ended_s is not None and each.ended_s < 4000.0]
    assert len(ended) == pytest.approx(160, abs=4 * 0.8 * 160**0.5)
    assert ended == [each.ended_s for each in same.former[: len(ended)]]
    assert ended != [each.ended_s for each in other.former[: len(ended)]]


@pytest.mark.parametrize(
    ("fault", "key", "rule"),
    [
        (
            {"kind": "fire", "instance": "decode-0", "at_s": 1.0},
            "fault.0.kind",
            "must be one of death, straggler",
        ),
        ({"kind": "death", "at_s": 1.0}, "fault.0.instance", "is not set: either it or pool must be$"),
        (
            {"kind": "death", "at_s": 1.0, "instance": "decode-0", "pool": "decode"},
            "fault.0.instance",
            "must not be set beside pool",
        ),
        (
            {"kind": "death", "pool": "decode", "at_s": 1.0, "times": 3.0},
            "fault.0.times",
            "is not a known key of this kind of table$",
        ),
        (death("decode-9", 1.0), "fault.0.instance", "from 0"),
        ({"kind": "death", "pool": "attic", "at_s": 1.0}, "fault.0.pool", "must be one of"),
        ({"kind": "death", "pool": "decode"}, "fault.0.at_s", "is not set: either it or mean"),
        (
            {"kind": "death", "pool": "decode", "at_s": 1.0, "mean_between_s": 2.0},
            "fault.0.at_s",
            "must not be set beside mean_between_s",
        ),
        (death("decode-0", -1.0), "fault.0.at_s", "0 or more"),
        (death("decode-0", 1.0, 0.0), "fault.0.lasts_s", "over 0"),
        ({"kind": "straggler", "pool": "decode", "at_s": 1.0, "times": 0.5}, "fault.0.times", "1 or more"),
        ({"kind": "slow_link", "pool": "decode", "at_s": 1.0, "share": 2.0}, "fault.0.share", "from 0 to 1"),
        (
            {"kind": "silence", "pool": "decode", "mean_between_s": 1.0},
            "fault.0.lasts_s",
            "must be set with mean_between_s",
        ),
    ],
)
def test_a_fault_that_makes_no_sense_is_an_error(fault: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        befallen(fault)
    assert caught.value.key == key


def test_links_are_never_busier_than_they_could_be() -> None:
    deaths = [
        {"kind": "death", "instance": "decode-0", "at_s": at_s, "lasts_s": 0.5} for at_s in (1.0, 5.0, 10.0)
    ]
    slow, pushed = {"link_bytes_per_s": 1e4}, {"layerwise_min_tokens": 10**6, "mode": "push"}
    simulated = mesh(pool("prefill"), pool("decode"), cluster=slow, transfer=pushed, fault=deaths)
    prefill, decode = measure(run(simulated, (0.0, 400, 20))).pools
    assert 0.8 < prefill.link_out <= 1.0
    assert 0.8 < decode.link_in <= 1.0


def test_requests_that_nobody_is_left_for_are_told_of_by_the_fault() -> None:
    dies = {"kind": "death", "instance": "prefill-0", "at_s": 1.0}
    deferred = {"prefill_policy": "deferred"}
    simulated = mesh(pool("prefill"), pool("decode"), scheduler=deferred, fault=[dies])
    with pytest.raises(ConfigError, match=r"fault = 'death of all for prefill': .* 1 requests wait for ever"):
        run(simulated, (0.0, 100, 2), (2.0, 100, 2), retries=10**6)


@pytest.mark.parametrize("binding", ["early", "late"])
def test_who_was_silent_for_longer_than_a_lease_and_comes_back_takes_requests_again(binding: str) -> None:
    """Its life is the same: that it was said to be gone says nothing of what is placed there afterwards."""
    silence = {"kind": "silence", "instance": "decode-1", "at_s": 2.0, "lasts_s": 5.0}
    simulated = mesh(
        pool("prefill"),
        pool("decode", 2),
        scheduler={"decode_binding": binding},
        cluster={"hop_s": 0.0002},
        fault=[silence],
    )
    requests = [(0.1 * number, 100, 5 + number % 20) for number in range(150)]
    cluster = run(simulated, *requests)
    assert list(cluster.records.drawn_tokens) == [tokens for _, _, tokens in requests]
    came_back = [number for number, (arrival_s, _, _) in enumerate(requests) if arrival_s > 7.5]
    assert {cluster.records.attempts[number] for number in came_back} == {1}
    assert len({cluster.records.decode[number] for number in came_back}) == 2
