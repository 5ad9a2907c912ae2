"""Several schedulers of one simulated mesh: each takes some of the calls, and knows what the others have
booked as soon as their word has come."""

from typing import Any

import pytest

from common.errors import ConfigError
from common.ids import InstanceId, RequestId
from scheduler.policy.grouping import others_instances
from services.simulator.autoscaling import Autoscaling
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.run import Load, simulate
from tests.services.simulator.meshes import mesh, offered, pool, run

HOP_S = 0.0002
REQUESTS = [(0.05 * number, 100 + 37 * number % 300, 5 + 11 * number % 60) for number in range(120)]


def shared(
    schedulers: int, *pools: dict[str, Any], cluster: dict[str, Any] | None = None, **sections: Any
) -> Simulated:
    members = {"hop_s": HOP_S, "schedulers": schedulers} | (cluster or {})
    return mesh(*(pools or (pool("prefill", 2), pool("decode", 4))), cluster=members, **sections)


def placed_by(cluster: Cluster) -> list[set[RequestId]]:
    """Of each scheduler."""
    return [
        {each.request_id for each in member.state.placer.log.newest(10_000)}
        for member in cluster.schedulers.members
    ]


@pytest.mark.parametrize("schedulers", [2, 3])
def test_each_takes_some_of_the_calls_and_every_request_is_answered(schedulers: int) -> None:
    cluster = run(shared(schedulers), *REQUESTS)
    assert list(cluster.records.drawn_tokens) == [tokens for _, _, tokens in REQUESTS]
    placed = placed_by(cluster)
    assert len(placed) == schedulers
    assert all(len(each) > len(REQUESTS) / schedulers / 2 for each in placed)
    assert sum(map(len, placed)) == len(REQUESTS)


def test_whose_call_it_is_hangs_on_the_seed_alone() -> None:
    def served(seed: int) -> tuple[str, list[set[RequestId]]]:
        cluster = simulate(shared(3), Load(offered(*REQUESTS)), seed=seed)
        return cluster.records.digest(), placed_by(cluster)

    assert served(1) == served(1)
    assert served(1)[1] != served(2)[1]


def test_each_knows_what_the_others_have_booked() -> None:
    """All of it, a message after it was booked, though each places a part."""
    seen: list[list[set[RequestId]]] = []

    def watch(cluster: Cluster) -> None:
        cluster.schedulers.open_mail()
        for member in cluster.schedulers.members:
            member.state.check()
        seen.append([set(member.state.requests) for member in cluster.schedulers.members])

    # Shown every few hundred requests, which come in pairs that are long apart for messages.
    pairs = [(0.2 * (number // 2), 200, 400) for number in range(600)]
    cluster = simulate(shared(2), Load(offered(*pairs)), watch=watch)
    assert len(seen) > 1
    assert all(one == other and len(one) > 5 for one, other in seen)
    own = [len(set(member.state.bookings.own())) for member in cluster.schedulers.members]
    assert own == [0, 0]


def test_in_the_same_moment_two_may_take_one_instance_for_the_emptiest() -> None:
    """What one scheduler spreads, two who have not heard of each other put where both find room first."""
    at_once = [(1.0, 100, 200)] * 4

    def most_together(schedulers: int) -> int:
        decodes = list(run(shared(schedulers), *at_once).records.decode)
        return max(map(decodes.count, decodes))

    assert most_together(1) == 1
    assert most_together(4) > 1


def test_with_groups_each_chooses_of_its_own() -> None:
    rules = {"grouped": True, "decode_policy": "least_loaded"}
    cluster = run(shared(2, pool("prefill", 2), pool("decode", 6), scheduler=rules), *REQUESTS)
    members = cluster.schedulers.members
    names = [member.state.incarnation for member in members]
    instances = [(each.record.role, each.instance_id) for each in cluster.instances.values()]
    chosen: list[set[InstanceId]] = []
    for member in members:
        others = others_instances(instances, names, member.state.incarnation)
        taken = {
            InstanceId(each.taken)
            for decision in member.state.placer.log.newest(10_000)
            # Until it has heard of the other one there are no groups.
            if decision.at_s > 0.1
            for each in decision.choices
            if each.taken
        }
        assert taken
        assert not taken & others
        chosen.append(taken)
    assert not chosen[0] & chosen[1]


def test_the_leader_alone_asks_sequences_to_leave_and_changes_roles() -> None:
    rules = {"decode_policy": "round_robin", "rebalance_decodes": True}
    small, large = (pool("decode", name=name, kv_tokens=kv) for name, kv in (("s", 4_000), ("l", 40_000)))
    roles = {"policy": "overflow", "overflow_queue_s": 0.5}
    long = [(0.1 * number, 100, 1_500) for number in range(8)]
    cluster = run(shared(3, pool("prefill"), small, large, scheduler=rules, roles=roles), *long)
    assert list(cluster.records.drawn_tokens) == [1_500] * 8
    asked = [member.asked_to_leave for member in cluster.schedulers.members]
    assert asked[0] > 0
    assert asked[1:] == [0, 0]
    assert [member.roles is None for member in cluster.schedulers.members] == [False, True, True]


@pytest.mark.parametrize("policy", ["deferred", "least_loaded"])
def test_an_instance_that_dies_is_missed_by_all_of_them(policy: str) -> None:
    fault = {"kind": "death", "instance": "decode-1", "at_s": 2.0, "lasts_s": 6.0}
    rules = {"prefill_policy": "deferred"} if policy == "deferred" else {"decode_policy": policy}
    simulated = shared(3, fault=[fault], scheduler=rules)
    missed: list[list[bool]] = []

    def watch(cluster: Cluster) -> None:
        cluster.clock.at(6.0, lambda: missed.append(missing(cluster)))

    def missing(cluster: Cluster) -> list[bool]:
        return [InstanceId("decode-1") not in each.state.instances for each in cluster.schedulers.members]

    # Somebody is to watch it before it is missed: the first of so many that have come by then.
    many = [(0.0, 10, 1)] * 300
    cluster = simulate(simulated, Load(offered(*many, *REQUESTS)), watch=watch)
    assert missed == [[True] * 3]
    assert cluster.gateway.continuations > 0
    assert list(cluster.records.drawn_tokens)[300:] == [tokens for _, _, tokens in REQUESTS]


def test_what_is_predicted_of_a_length_reaches_all() -> None:
    """By the one that asked the predictor, with what it has booked."""
    known: list[list[int]] = []

    def watch(cluster: Cluster) -> None:
        cluster.schedulers.open_mail()
        known.append(
            [
                sum(placed.predicted is not None for placed in member.state.requests.values())
                for member in cluster.schedulers.members
            ]
        )

    prediction = {"accuracy": 1.0, "delay_s": 0.01}
    pairs = [(0.2 * (number // 2), 200, 400) for number in range(600)]
    simulate(shared(2, prediction=prediction), Load(offered(*pairs)), watch=watch)
    assert known
    assert all(one == other > 5 for one, other in known)


def test_a_plan_counts_each_request_once() -> None:
    """Whoever was asked: the leader hears what it is asked, what others book, and each end."""
    rates = []
    for schedulers in (1, 3):
        members = run(shared(schedulers, scaling={"policy": "dry_run", "window_s": 2.0}), *REQUESTS)
        leader, *others = members.schedulers.members
        assert isinstance(leader.listener, Autoscaling)
        assert [each.listener for each in others] == [None] * (schedulers - 1)
        rates.append([plan.workload.rate_per_s for _, plan in leader.listener.plans[:2]])
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0][1] == pytest.approx(20.0, rel=0.2)


@pytest.mark.parametrize("schedulers", [0, -1, 65])
def test_their_number_is_bounded(schedulers: int) -> None:
    with pytest.raises(ConfigError, match="must be 1 to 64") as caught:
        shared(schedulers)
    assert (caught.value.key, caught.value.value) == ("cluster.schedulers", schedulers)


def test_one_alone_tells_nobody() -> None:
    cluster = run(shared(1), *REQUESTS)
    assert not cluster.schedulers.leader.peers
    assert not cluster.schedulers.leader.state.peers.known
    assert not cluster.schedulers.leader.state.bookings.changes
