"""What is said to kubectl, and when a change of pods counts as done."""

import asyncio
import json
from pathlib import Path

import pytest

from common.errors import ConfigError, LauncherError
from services.connectors import kubernetes
from services.connectors.kubernetes import KubernetesConnector
from services.launcher.wishes import LastOfPhase, RoleChange, RoleCount, parse_wishes
from tests.services.connectors.programs import PODS, pretend_kubectl


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kubernetes, "LOOK_INTERVAL_S", 0.01)
    return pretend_kubectl(tmp_path, monkeypatch)


def apply(*wishes: str, timeout_s: float = 60.0) -> list[RoleChange]:
    return asyncio.run(KubernetesConnector("lamella", ready_timeout_s=timeout_s).apply(parse_wishes(wishes)))


def scalings(log: Path) -> list[str]:
    lines = log.read_text().splitlines()
    return [line.removeprefix("--namespace lamella ") for line in lines if " scale " in line]


def test_a_change_is_done_when_new_pods_are_ready_and_surplus_ones_are_gone(kubectl: Path) -> None:
    assert apply("prefill=2", "decode=-1") == [
        RoleChange("prefill", 1, 2, ("prefill-new1",)),
        RoleChange("decode", 2, 1, (), ("decode-b",)),
    ]
    assert scalings(kubectl) == [
        "scale deployment/prefill --replicas=2",
        "scale deployment/decode --replicas=1",
    ]


def test_pods_that_do_not_become_ready_are_told_of_and_left_to_the_cluster(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECTL_LOOKS", "1000000")
    with pytest.raises(LauncherError, match=r"decode: 2 pods ready instead of 3 after 0\.1 s: the cluster"):
        apply("decode=+1", timeout_s=0.1)
    assert scalings(kubectl) == ["scale deployment/decode --replicas=3"]


def test_the_last_pod_of_a_phase_ends_by_force(kubectl: Path) -> None:
    connector = KubernetesConnector("lamella", is_forced=True)
    [change] = asyncio.run(connector.apply(parse_wishes(["decode=0"])))
    assert change.after == 0
    assert scalings(kubectl) == ["scale deployment/decode --replicas=0"]


def test_one_pod_is_drained_and_none_takes_its_place(kubectl: Path) -> None:
    asyncio.run(KubernetesConnector("lamella").drain("decode-a"))
    assert scalings(kubectl) == ["scale deployment/decode --replicas=1"]
    assert apply("decode=+0") == [RoleChange("decode", 1, 1)]
    with pytest.raises(LauncherError, match="no pod of the mesh in the namespace lamella is decode-a"):
        asyncio.run(KubernetesConnector("lamella").drain("decode-a"))


def test_how_many_there_are_is_told_and_nothing_is_changed(kubectl: Path, tmp_path: Path) -> None:
    """A pod is missing, and a Deployment is to have none."""
    replicas = {"gateway": 1, "prefill": 1, "decode": 3, "mixed": 0}
    (tmp_path / "state").write_text(json.dumps({"replicas": replicas, "pods": PODS}))
    assert asyncio.run(KubernetesConnector("lamella").standing()).counts == [
        RoleCount("gateway", 1, 1),
        RoleCount("prefill", 1, 1),
        RoleCount("decode", 2, 3),
        RoleCount("mixed", 0, 0),
    ]
    said = [
        line.removeprefix("--namespace lamella ").split()[:2] for line in kubectl.read_text().splitlines()
    ]
    assert said == [["get", "deployments"], ["get", "pods"]]


@pytest.mark.usefixtures("kubectl")
def test_where_there_is_no_deployment_of_the_mesh_nothing_is_counted(tmp_path: Path) -> None:
    (tmp_path / "state").write_text('{"replicas": {}, "pods": {}}')
    with pytest.raises(LauncherError, match="no Deployment of the mesh in the namespace lamella"):
        asyncio.run(KubernetesConnector("lamella").standing())


@pytest.mark.parametrize(
    ("wish", "error", "said"),
    [
        ("mixed=1", LauncherError, "no Deployment mixed in the namespace lamella"),
        ("decode=0", LastOfPhase, "no instance would be left that does decode"),
        ("decode=-3", ConfigError, r"must be 0\.\.1000"),
        ("scheduler=0", ConfigError, "nobody else places requests"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_done(
    kubectl: Path, wish: str, error: type[LauncherError], said: str
) -> None:
    with pytest.raises(error, match=said):
        apply(wish)
    assert scalings(kubectl) == []
