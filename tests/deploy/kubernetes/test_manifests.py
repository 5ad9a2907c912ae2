"""What every overlay promises, whatever it adds."""

import re
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from common.bus import CLOSE_TIMEOUT_S
from common.config_file import ENVIRONMENT
from common.http import HTTP_STOP_TIMEOUT_S
from common.secret_files import FILE_VARIABLES
from common.service import DRAIN_GRACE_S
from services.hosts.roles import ServiceRole
from tests.deploy.kubernetes.manifests import (
    OVERLAYS,
    Manifest,
    container_of,
    environment_of,
    files_of,
    labels_of,
    of_kind,
    pod_of,
    rendered,
    services,
    settings_of,
    workloads,
)

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)

ROLES: tuple[str, ...] = get_args(ServiceRole)
OLDEST, NEWEST = "1.30", "1.37"
SECRETS = {"nats": {"nats-users"}, "redis": {"redis-users"}, "gateway": {"service-urls", "admin-key"}}
NOT_KUBERNETES_OWN = ("ScaledObject", "PodMonitor")


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_every_object_and_knows_every_field(overlay: str, version: str) -> None:
    for each in rendered(overlay):
        if each["kind"] not in NOT_KUBERNETES_OWN:
            kubernetes_validate.validate(each, version, strict=True)


def test_everything_lies_in_one_namespace_that_refuses_privileges(overlay: str) -> None:
    for each in rendered(overlay):
        if each["kind"] == "Namespace":
            assert each["metadata"]["name"] == "lamella"
            assert each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        else:
            assert each["metadata"]["namespace"] == "lamella"


def test_every_role_has_a_deployment_of_its_name(overlay: str) -> None:
    found = services(rendered(overlay))
    assert set(found) == set(ROLES)
    for role, each in found.items():
        assert each["kind"] == "Deployment"
        assert container_of(each)["args"][:2] == ["serve", role]


def test_a_pod_is_nobody_and_cannot_write_but_where_it_must(overlay: str) -> None:
    for each in workloads(rendered(overlay)).values():
        pod, container = pod_of(each), container_of(each)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}


def test_a_probe_asks_only_whether_the_loop_turns_before_it_starts_a_service_again(overlay: str) -> None:
    for each in services(rendered(overlay)).values():
        container = container_of(each)
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health/live", "port": "http"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "http"}


def test_nats_and_redis_are_probed_too(overlay: str) -> None:
    found = workloads(rendered(overlay))
    for name in ("nats", "redis"):
        assert container_of(found[name]).keys() >= {"startupProbe", "livenessProbe", "readinessProbe"}


def test_a_stop_is_given_more_time_than_a_drain_takes(overlay: str, tmp_path: Path) -> None:
    objects = rendered(overlay)
    for each in services(objects).values():
        hook = container_of(each).get("lifecycle", {}).get("preStop", {})
        before_s = hook.get("sleep", {}).get("seconds", 0)
        drain_s = settings_of(each, objects, tmp_path).mesh.drain_timeout_s + DRAIN_GRACE_S
        needed_s = before_s + drain_s + CLOSE_TIMEOUT_S + HTTP_STOP_TIMEOUT_S
        assert pod_of(each)["terminationGracePeriodSeconds"] > needed_s


def test_a_gateway_takes_requests_until_nobody_sends_it_more(overlay: str) -> None:
    """Its address leaves the Service a moment after it is told to stop."""
    gateway = container_of(services(rendered(overlay))["gateway"])
    assert gateway["lifecycle"]["preStop"]["sleep"]["seconds"] >= 3


def test_a_service_is_reached_at_its_pods_address_and_known_by_its_pods_name(overlay: str) -> None:
    objects = rendered(overlay)
    for each in services(objects).values():
        variables = environment_of(each, objects)
        assert variables["LAMELLA_SERVICE_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        for variable in ("LAMELLA_ADVERTISE_HOST", "LAMELLA_TRANSFER_HOST"):
            assert variables[variable] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_any_number_of_attention_workers_serves_every_decode_instance_that_is_planned(
    overlay: str, tmp_path: Path
) -> None:
    objects = rendered(overlay)
    for each in services(objects).values():
        settings = settings_of(each, objects, tmp_path)
        assert settings.instance.attention_partition == "requests"
        assert settings.attention.decode_instances >= settings.scaling.max_decode


def test_kv_moves_through_mooncake(overlay: str, tmp_path: Path) -> None:
    objects = rendered(overlay)
    for each in services(objects).values():
        assert settings_of(each, objects, tmp_path).transfer.path == "mooncake"


def test_only_variables_that_are_read_are_set_and_none_by_chance(overlay: str) -> None:
    """A Service named `lamella` would set LAMELLA_PORT in every pod that takes links."""
    objects = rendered(overlay)
    for each in services(objects).values():
        assert environment_of(each, objects).keys() <= {*ENVIRONMENT, *FILE_VARIABLES}
        assert pod_of(each)["enableServiceLinks"] is False


def test_an_instance_computes_on_the_cores_that_are_kept_for_it(overlay: str) -> None:
    objects = rendered(overlay)
    for role, each in services(objects).items():
        threads = environment_of(each, objects).get("LAMELLA_THREADS")
        if role in ("gateway", "scheduler", "predictor"):
            assert threads is None
        else:
            source = {"containerName": "lamella", "resource": "requests.cpu"}
            assert threads == {"resourceFieldRef": source}
        assert "cpu" not in container_of(each)["resources"]["limits"]


def test_every_volume_and_mount_has_its_other_end(overlay: str) -> None:
    objects = rendered(overlay)
    claims = of_kind(objects, "PersistentVolumeClaim")
    for each in workloads(objects).values():
        volumes = {volume["name"]: volume for volume in pod_of(each).get("volumes", ())}
        assert {mount["name"] for mount in container_of(each)["volumeMounts"]} == set(volumes)
        named = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert named <= set(claims)
        # Raises KeyError where a ConfigMap is not there.
        assert dict(files_of(each, objects))


def test_nothing_is_taken_by_the_tag_latest(overlay: str) -> None:
    for each in workloads(rendered(overlay)).values():
        assert re.fullmatch(r"[a-z]+:(?!latest$)[\w.-]+", container_of(each)["image"])


def test_a_selector_finds_its_pods_and_a_service_their_port(overlay: str) -> None:
    objects = rendered(overlay)
    for each in workloads(objects).values():
        assert each["spec"]["selector"]["matchLabels"].items() <= labels_of(each).items()
    for each in of_kind(objects, "Service").values():
        (found,) = _selected(each["spec"]["selector"], objects)
        ports = {port["name"] for port in container_of(found)["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports


def test_the_urls_name_services_and_their_ports(overlay: str) -> None:
    objects = rendered(overlay)
    for url, scheme in zip(_urls(objects), ("nats", "redis"), strict=True):
        found = re.fullmatch(rf"{scheme}://lamella:[0-9a-f]+@([a-z]+):(\d+)(/0)?", url)
        assert found is not None
        ports = of_kind(objects, "Service")[found.group(1)]["spec"]["ports"]
        assert int(found.group(2)) in {port["port"] for port in ports}


def test_every_secret_is_a_file_that_only_its_readers_mount(overlay: str) -> None:
    objects = rendered(overlay)
    for name, each in workloads(objects).items():
        mounted = [volume["secret"] for volume in pod_of(each)["volumes"] if "secret" in volume]
        wanted = SECRETS.get(name, {"service-urls"})
        assert {secret["secretName"].rpartition("-")[0] for secret in mounted} == wanted
        # By its group, which is the pod's user's, and not by who else is in the pod.
        assert {secret["defaultMode"] for secret in mounted} == {0o440}
        assert pod_of(each)["securityContext"]["fsGroup"] == 10001


def test_only_who_may_forward_a_gateways_port_sees_its_private_one(overlay: str, tmp_path: Path) -> None:
    objects = rendered(overlay)
    gateway = services(objects)["gateway"]
    settings = settings_of(gateway, objects, tmp_path).gateway
    assert settings.private_port == 8001
    assert settings.admin_key_file is not None
    assert settings.admin_key_file.read_text()
    for each in of_kind(objects, "Service").values():
        assert 8001 not in {port["port"] for port in each["spec"]["ports"]}


def test_no_password_stands_where_it_shows(overlay: str) -> None:
    objects = rendered(overlay)
    passwords = [urlsplit(url).password for url in _urls(objects)]
    shown = str([each for each in objects if each["kind"] != "Secret"])
    for password in passwords:
        assert password
        assert password not in shown


def _urls(objects: list[Manifest]) -> list[str]:
    """With which services connect to NATS and to Redis."""
    decode = services(objects)["decode"]
    files, variables = dict(files_of(decode, objects)), environment_of(decode, objects)
    return [files[Path(str(variables[name]))] for name in FILE_VARIABLES]


def test_of_each_kind_one_pod_may_be_moved_at_a_time(overlay: str) -> None:
    objects = rendered(overlay)
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert set(budgets) == set(workloads(objects))
    for name, each in budgets.items():
        assert each["spec"]["maxUnavailable"] == 1
        assert _selected(each["spec"]["selector"]["matchLabels"], objects) == [workloads(objects)[name]]


def _selected(labels: dict[str, str], objects: list[Manifest]) -> list[Manifest]:
    return [each for each in workloads(objects).values() if labels.items() <= labels_of(each).items()]
