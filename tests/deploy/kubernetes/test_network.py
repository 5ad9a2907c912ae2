"""NetworkPolicies: what keeps NATS, Redis and Mooncake to the mesh, and lets the mesh work."""

from pathlib import Path
from typing import get_args

import pytest

from common.config import TransferConfig
from common.messages import Role
from services.hosts.roles import ServiceRole
from tests.deploy.kubernetes.manifests import (
    OVERLAYS,
    Manifest,
    labels_of,
    of_kind,
    rendered,
    services,
    settings_of,
    workloads,
)
from tests.deploy.kubernetes.network import Peer, may_connect

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)

ROLES: tuple[str, ...] = get_args(ServiceRole)
KV_HOLDERS = {*get_args(Role), "attention"}
NAMESPACE = "lamella"
STRANGER = Peer(NAMESPACE, {"app": "something else in the namespace"})
OUTSIDER = Peer("elsewhere", {})


class Network:
    """The pods of an overlay, by what they are, and who of them reaches whom."""

    def __init__(self, overlay: str) -> None:
        self.objects = rendered(overlay)
        self.policies: list[Manifest] = list(of_kind(self.objects, "NetworkPolicy").values())
        self.pods = {
            name: Peer(NAMESPACE, labels_of(each)) for name, each in workloads(self.objects).items()
        } | {"stranger": STRANGER, "outsider": OUTSIDER}

    def reaches(self, source: str, destination: str, port: int) -> bool:
        return may_connect(self.policies, self.pods[source], self.pods[destination], port)

    def who_reaches(self, destination: str, port: int) -> set[str]:
        return {name for name in self.pods if name != destination and self.reaches(name, destination, port)}


def test_every_service_reaches_nats_and_redis_and_nobody_else_does(overlay: str) -> None:
    network = Network(overlay)
    assert network.who_reaches("nats", 4222) == set(ROLES)
    assert network.who_reaches("redis", 6379) == set(ROLES)


def test_mooncakes_ports_are_open_among_those_that_hold_kv_and_to_nobody_else(
    overlay: str, tmp_path: Path
) -> None:
    network = Network(overlay)
    for name in KV_HOLDERS:
        transfer = settings_of(services(network.objects)[name], network.objects, tmp_path).transfer
        for port in (transfer.min_port, transfer.max_port):
            assert network.who_reaches(name, port) | {name} == KV_HOLDERS
            assert network.reaches(name, name, port), "two replicas of one role"
        for port in (transfer.min_port - 1, transfer.max_port + 1):
            assert network.who_reaches(name, port) == set()


def test_mooncakes_ports_are_its_defaults_under_the_systems_own_range(overlay: str, tmp_path: Path) -> None:
    objects = rendered(overlay)
    transfer = settings_of(services(objects)["decode"], objects, tmp_path).transfer
    defaults = TransferConfig()
    assert (transfer.min_port, transfer.max_port) == (defaults.min_port, defaults.max_port)


def test_anybody_reaches_a_gateway_and_only_its_port_for_clients(overlay: str) -> None:
    network = Network(overlay)
    assert network.reaches("outsider", "gateway", 8000)
    for port in (8001, 22, 20_000):
        assert network.who_reaches("gateway", port) == set()


def test_a_gateway_may_ask_the_others_schedulers_see_who_ends_and_no_stranger_may(overlay: str) -> None:
    network = Network(overlay)
    for role in set(ROLES) - {"gateway"}:
        expected = {"gateway", "scheduler"} if role in KV_HOLDERS else {"gateway"}
        assert network.who_reaches(role, 8000) == expected


def test_nothing_leaves_but_questions_to_dns(overlay: str) -> None:
    network = Network(overlay)
    dns = Peer("kube-system", {"k8s-app": "kube-dns"})
    internet = Peer("", {})
    for name, pod in network.pods.items():
        if name == "outsider":
            continue
        assert may_connect(network.policies, pod, dns, 53, "UDP")
        for port in (53, 80, 443, 4222):
            assert not may_connect(network.policies, pod, internet, port)


def test_prometheus_reads_metrics_where_it_is_there(overlay: str) -> None:
    network = Network(overlay)
    prometheus = Peer("monitoring", {"app.kubernetes.io/name": "prometheus"})
    is_there = bool(of_kind(network.objects, "PodMonitor"))
    for role in set(ROLES) - {"gateway"}:
        assert may_connect(network.policies, prometheus, network.pods[role], 8000) is is_there
    assert may_connect(network.policies, prometheus, network.pods["gateway"], 8001) is is_there
    assert not may_connect(network.policies, prometheus, network.pods["nats"], 4222)


def test_whoever_lives_beside_prometheus_does_not_reach_what_is_private(overlay: str) -> None:
    network = Network(overlay)
    neighbour = Peer("monitoring", {"app.kubernetes.io/name": "grafana"})
    impostor = Peer(NAMESPACE, {"app.kubernetes.io/name": "prometheus"})
    for each in (neighbour, impostor):
        assert not may_connect(network.policies, each, network.pods["gateway"], 8001)


def test_nats_servers_reach_each_other_where_they_are_several(overlay: str) -> None:
    network = Network(overlay)
    is_cluster = workloads(network.objects)["nats"]["spec"]["replicas"] > 1
    assert network.reaches("nats", "nats", 6222) is is_cluster
    assert network.who_reaches("nats", 6222) == set()
