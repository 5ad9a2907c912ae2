"""Ready files: what reads them reads them."""

import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml  # type: ignore[import-untyped]

from attention.state import AttentionState, BindArrived, StartServing
from common.config_file import load_config
from common.devices import A100, DEVICES
from common.errors import ConfigError
from common.ids import BindingId, Incarnation, InstanceId
from common.kv.layout import KVLayout
from common.latency import ServiceObjectives
from common.messages import InstanceLife
from common.shapes import LLAMA3_8B
from common.spec import AttentionSpec
from decode.attention_needs import AttentionNeeds
from deploy import credentials
from services.bench.traces import TraceRequest
from services.hosts.engines import has_remote_attention
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.files import (
    ROLES,
    deployment_files,
    files_of_others,
    notes_of,
    toml_text,
    write_deployment,
)
from services.planner.simulating import Conditions
from services.simulator.attention_config import bind_message
from services.simulator.config import load_simulated
from services.source_root import SOURCE
from tests.deploy.kubernetes.manifests import (
    KUBERNETES,
    ROOT,
    container_of,
    pod_of,
    services,
    settings_of,
    workloads,
)

CONDITIONS = Conditions(
    shape=LLAMA3_8B,
    rows=(TraceRequest(None, 100, 10),),
    objectives=ServiceObjectives(ttft_s=0.5, tpot_s=0.05),
    settings={"instance": {"block_size": 16}, "scheduler": {"decode_policy": "power_of_two"}},
)
PREFILL = InstanceKind(
    role="prefill", device="h100", tensor=2, chunk_tokens=2048, prefill_batching="saturation"
)
DECODE = InstanceKind(role="decode", device="a100", tensor=1, max_decode_batch=128)
MIXED = InstanceKind(role="mixed", device="a100", chunk_tokens=1024, mixed_policy="prefill_first")
REMOTE = InstanceKind(
    role="decode",
    device="h100",
    tensor=1,
    max_decode_batch=96,
    attention_workers=2,
    attention_device="h20",
    staggered_batches=2,
)
THREEFOLD = (PoolPlan(kind=PREFILL, count=3), PoolPlan(kind=REMOTE, count=2))
APART = (PoolPlan(kind=PREFILL, count=3), PoolPlan(kind=DECODE, count=4))
COUPLED = (PoolPlan(kind=MIXED, count=2),)
OTHER_ROLES = ("prefill", "decode", "attention")


@pytest.mark.parametrize("pools", [APART, COUPLED, THREEFOLD])
def test_settings_are_read_by_the_loader_that_services_use(
    pools: tuple[PoolPlan, ...], tmp_path: Path
) -> None:
    write_deployment(pools, CONDITIONS, tmp_path)
    shared = load_config(tmp_path / "lamella.toml", {})
    assert (shared.objectives.ttft_s, shared.objectives.tpot_s) == (0.5, 0.05)
    assert shared.scheduler.decode_policy == "power_of_two"
    for pool in pools:
        config = load_config(tmp_path / f"{pool.kind.role}.toml", {})
        assert config.instance.role == pool.kind.role
        assert config.instance.block_size == 16
        for key, value in pool.kind.settings.items():
            assert getattr(config.instance, key) == value
        assert getattr(config.scaling, f"min_{pool.kind.role}") == pool.count
        if pool.kind.attention_workers:
            continue
        free = 0.9 * pool.kind.devices * 80e9 - 2 * LLAMA3_8B.parameters
        assert 0.99 * free < config.instance.kv_bytes <= free


def test_what_another_deployment_left_is_named_and_stays(tmp_path: Path) -> None:
    for pools in (THREEFOLD, COUPLED):
        assert files_of_others(pools, tmp_path) == []
    write_deployment(THREEFOLD, CONDITIONS, tmp_path)
    assert files_of_others(THREEFOLD, tmp_path) == []
    write_deployment(COUPLED, CONDITIONS, tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in files_of_others(COUPLED, tmp_path)]
    assert left == [f"{folder}{role}.toml" for folder in ("", "kubernetes/") for role in OTHER_ROLES]
    assert (tmp_path / "decode.toml").is_file()


def test_attention_workers_have_room_for_what_is_planned(tmp_path: Path) -> None:
    write_deployment(THREEFOLD, CONDITIONS, tmp_path)
    decode, workers = (load_config(tmp_path / f"{name}.toml", {}) for name in ("decode", "attention"))
    assert has_remote_attention(decode)
    assert (decode.instance.attention_workers, decode.instance.attention_partition) == (4, "heads")
    assert (decode.instance.pipeline, decode.instance.staggered_batches) == ("rotational", 2)
    assert workers.attention.decode_instances == 2
    assert 0.89 * 96e9 < workers.attention.kv_bytes <= 0.9 * 96e9
    assert (workers.scaling.min_attention, workers.scaling.max_attention) == (4, 4)
    layout = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, element_bytes=2)
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    needs = AttentionNeeds(32, layout, (spec,) * 32, "bfloat16", 131_072, 96, 4, "heads", 1, 2)
    life = InstanceLife(InstanceId("decode-0"), Incarnation("first"))
    bind = bind_message(needs, 0, life, BindingId("first"))
    attention = workers.attention
    state = AttentionState("a", attention.kv_bytes, attention.exchange_bytes, attention.decode_instances)
    (start,) = (each for each in state.handle(BindArrived(bind)) if isinstance(each, StartServing))
    assert start.total_blocks > 0


@pytest.mark.parametrize("pools", [APART, COUPLED, THREEFOLD])
def test_the_simulator_reads_its_own(pools: tuple[PoolPlan, ...], tmp_path: Path) -> None:
    write_deployment(pools, CONDITIONS, tmp_path)
    simulated = load_simulated(tmp_path / "simulate.toml")
    assert [(each.config.count, each.config.devices) for each in simulated.pools] == [
        (pool.count, pool.kind.own_devices) for pool in pools
    ]
    workers = [pool.count * pool.kind.attention_workers for pool in pools if pool.kind.attention_workers]
    assert ([] if simulated.attention is None else [simulated.attention.config.count]) == workers
    assert simulated.shape == LLAMA3_8B


def test_a_device_of_one_s_own_goes_with_the_files(tmp_path: Path) -> None:
    own = replace(A100, name="mine", memory_gb=48, power_w=None, has_reached_rates=True)
    conditions = replace(CONDITIONS, catalogue={**DEVICES, "mine": own})
    pools = (PoolPlan(kind=msgspec.structs.replace(MIXED, device="mine"), count=2),)
    write_deployment(pools, conditions, tmp_path)
    assert load_simulated(tmp_path / "simulate.toml").pools[0].device == own
    config = load_config(tmp_path / "mixed.toml", {})
    free = 0.9 * 48e9 - 2 * LLAMA3_8B.parameters
    assert 0.99 * free < config.instance.kv_bytes <= free
    assert 'lamella.dev/device: "mine"' in (tmp_path / "kubernetes" / "kustomization.yaml").read_text()
    (note,) = notes_of(pools)
    assert "mine is a device of your own" in note


def test_accelerators_of_the_catalogue_that_are_no_nvidia_gpus_are_told() -> None:
    pools = (PoolPlan(kind=msgspec.structs.replace(MIXED, device="tpu-v6e"), count=2),)
    (note,) = notes_of(pools)
    assert note.startswith("tpu-v6e is no NVIDIA GPU")


def composed(directory: Path) -> dict[str, Any]:
    if shutil.which("docker") is None:
        pytest.skip("no docker: the override is not merged")
    command = (
        *("docker", "compose", "-f", "docker-compose.yml", "-f", str(directory / "compose.override.yml")),
        *("--profile", "plan", "config"),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if "is not a docker command" in done.stderr or "unknown shorthand flag" in done.stderr:
        pytest.skip("no compose: the override is not merged")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


@pytest.mark.parametrize("pools", [APART, COUPLED, THREEFOLD])
def test_compose_merges_the_override(pools: tuple[PoolPlan, ...], tmp_path: Path) -> None:
    write_deployment(pools, CONDITIONS, tmp_path)
    found = composed(tmp_path)
    assert found["services"]["prefill"]["deploy"]["replicas"] == 0
    for pool in pools:
        role = pool.kind.role
        service = found["services"][f"plan-{role}"]
        assert service["deploy"]["replicas"] == pool.count
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["count"] == pool.kind.own_devices
        assert service["command"] == ["serve", role, "--config", f"/etc/lamella/{role}.toml"]
        assert service["environment"]["LAMELLA_DEVICE"] == "cuda"
        assert service["read_only"] is True
        assert {each["target"] for each in service["configs"]} >= {f"/etc/lamella/{role}.toml"}
        workers = pool.count * pool.kind.attention_workers
        assert service["environment"]["LAMELLA_ATTENTION_WORKERS"] == str(workers)
        if workers:
            attention = found["services"]["plan-attention"]
            assert attention["deploy"]["replicas"] == workers
            assert attention["environment"]["LAMELLA_ATTENTION_DEVICE"] == "cuda"
            assert attention["command"] == ["serve", "attention", "--config", "/etc/lamella/attention.toml"]
        text = found["configs"][f"plan-{role}"]["content"]
        assert tomllib.loads(text) == tomllib.loads((tmp_path / f"{role}.toml").read_text())


@pytest.mark.parametrize("pools", [APART, COUPLED, THREEFOLD])
def test_kubernetes_takes_the_overlay(
    pools: tuple[PoolPlan, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: the overlay is not rendered")
    copy = tmp_path / "repository"
    shutil.copytree(KUBERNETES, copy / "deploy" / "kubernetes", ignore=shutil.ignore_patterns("secrets"))
    credentials.fill(copy / "deploy" / "kubernetes" / "base" / "secrets")
    monkeypatch.setenv(SOURCE, str(copy))
    write_deployment(pools, CONDITIONS, tmp_path / "out")
    command = (kubectl, "kustomize", str(tmp_path / "out" / "kubernetes"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    for each in objects:
        kubernetes_validate.validate(each, "1.30", strict=True)
    counts = {name: each["spec"].get("replicas") for name, each in workloads(objects).items()}
    assert counts["attention"] == sum(pool.count * pool.kind.attention_workers for pool in pools)
    if counts["attention"]:
        worker = services(objects)["attention"]
        assert container_of(worker)["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert pod_of(worker)["nodeSelector"] == {"lamella.dev/device": "h20"}
        assert settings_of(worker, objects, tmp_path / "attention").attention.decode_instances == 2
    planned = {pool.kind.role: pool.count for pool in pools}
    assert {role: counts[role] for role in ROLES} == {role: planned.get(role, 0) for role in ROLES}
    for pool in pools:
        found = services(objects)[pool.kind.role]
        limits = container_of(found)["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == pool.kind.own_devices
        assert pod_of(found)["nodeSelector"] == {"lamella.dev/device": pool.kind.device}
        config = settings_of(found, objects, tmp_path / pool.kind.role)
        assert config.instance.role == pool.kind.role
        for key, value in pool.kind.settings.items():
            assert getattr(config.instance, key) == value


def test_two_pools_of_one_role_are_no_deployment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one pool of each role"):
        deployment_files((*COUPLED, *COUPLED), CONDITIONS, tmp_path)


def test_settings_that_no_service_takes_are_not_written(tmp_path: Path) -> None:
    broken = Conditions(
        shape=LLAMA3_8B,
        rows=CONDITIONS.rows,
        objectives=CONDITIONS.objectives,
        settings={"instance": {"block_size": 0}},
    )
    with pytest.raises(ConfigError, match="block_size"):
        write_deployment(COUPLED, broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_files_cannot_do_is_said() -> None:
    wide, mixed = notes_of(APART)
    assert "h100 TP2" in wide
    assert "device_ids" in mixed
    _, kept, _ = notes_of(THREEFOLD)
    assert "attention.kv_bytes" in kept
    assert list(notes_of(COUPLED)) == []


def test_toml_is_read_back_as_it_was() -> None:
    tree = {"a": {"text": 'quo"ted\x7f', "many": [1, 2.5], "deep": {"on": True}}, "b": [{"n": 1}, {"n": 2}]}
    assert tomllib.loads(toml_text(tree)) == tree
