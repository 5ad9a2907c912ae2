"""Ready files for a deployment that was chosen: settings, an override for compose, an overlay for Kubernetes,
and a configuration with which it can be simulated again.

Every file of settings is read by the loader that services use before anything is written. Services that hold
no KV read ``lamella.toml``, instances that of their role: pools on unlike devices have unlike memory."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config_file import config_from_tree, toml_value
from common.cost import kv_token_bytes, weight_bytes
from common.devices import DEVICES, TPU_V6E
from common.errors import ConfigError
from common.messages import Role
from services.output_files import write_whole
from services.planner import attention_kinds
from services.planner.candidates import GIB, MEMORY_SHARE, PoolPlan, kv_room_tokens
from services.planner.simulating import Conditions, attention_settings, tree_of
from services.source_root import source_root

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
HOST_GIB = 16
"""Of a host's memory beside the weights on their way: CUDA's own, torch, ``instance.swap_bytes``."""
SWAP_BYTES = 8 << 30
OTHER_THAN_NVIDIA = frozenset((TPU_V6E.name,))
GROWTH = 2
"""Times as many instances as planned may be asked for by the scheduler's plan."""


def deployment_files(pools: Sequence[PoolPlan], conditions: Conditions, directory: Path) -> dict[str, str]:
    """Texts by their names below ``directory``. Raises ConfigError for what no deployment can be made of."""
    by_role = {pool.kind.role: pool for pool in pools}
    if len(by_role) != len(pools):
        raise ConfigError("--out", str(directory), "needs one pool of each role at the most")
    shared = shared_settings(by_role, conditions)
    texts = {"lamella.toml": _settings_text(shared)}
    for role, pool in by_role.items():
        texts[f"{role}.toml"] = _settings_text({**shared, "instance": instance_settings(pool, conditions)})
    apart = attention_pool(by_role)
    if apart is not None:
        texts["attention.toml"] = _settings_text({**shared, "attention": worker_settings(apart, conditions)})
    settings = dict(texts)
    texts["simulate.toml"] = toml_text(tree_of(pools, conditions))
    texts["compose.override.yml"] = compose_override(by_role, settings, conditions)
    base = os.path.relpath(
        source_root() / "deploy" / "kubernetes" / "overlays" / "gpu", directory / "kubernetes"
    )
    texts["kubernetes/kustomization.yaml"] = kustomization(by_role, settings, base, conditions)
    texts |= {f"kubernetes/{name}": text for name, text in settings.items()}
    return texts


def write_deployment(pools: Sequence[PoolPlan], conditions: Conditions, directory: Path) -> list[Path]:
    """What was written. Raises ConfigError."""
    texts = deployment_files(pools, conditions, directory)
    written = []
    for name, text in texts.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError("--out", str(path.parent), f"cannot be made ({exc.strerror})") from exc
        write_whole("--out", path, text.encode())
        written.append(path)
    return written


def files_of_others(pools: Sequence[PoolPlan], directory: Path) -> list[Path]:
    """Settings of roles that this deployment does not have, as an earlier one left them there: they are
    somebody's by now."""
    roles = {str(pool.kind.role) for pool in pools}
    if attention_pool({pool.kind.role: pool for pool in pools}) is not None:
        roles.add("attention")
    names = [f"{role}.toml" for role in (*ROLES, "attention") if role not in roles]
    paths = [folder / name for folder in (directory, directory / "kubernetes") for name in names]
    return [path for path in paths if path.is_file()]


def shared_settings(by_role: Mapping[Role, PoolPlan], conditions: Conditions) -> dict[str, Any]:
    """Of services that hold no KV."""
    objectives = {
        key: value
        for key, value in (
            ("ttft_s", conditions.objectives.ttft_s),
            ("tpot_s", conditions.objectives.tpot_s),
            ("end_to_end_s", conditions.objectives.end_to_end_s),
        )
        if value is not None
    }
    scaling: dict[str, Any] = {"policy": "dry_run"}
    for role, pool in by_role.items():
        scaling |= {f"min_{role}": pool.count, f"max_{role}": GROWTH * pool.count}
    apart = attention_pool(by_role)
    if apart is not None:
        # Each of its workers has memory for so many decode instances, and they hold the KV of all of these.
        workers = apart.count * apart.kind.attention_workers
        scaling |= {"max_decode": apart.count, "min_attention": workers, "max_attention": workers}
    added: dict[str, dict[str, Any]] = {
        "objectives": objectives,
        "transfer": {"path": "mooncake", "min_port": 20000, "max_port": 32000},
        "scaling": scaling,
    }
    settings = {key: dict(value) for key, value in conditions.settings.items()}
    for section, keys in added.items():
        settings[section] = {**settings.get(section, {}), **keys}
    return settings


def attention_pool(by_role: Mapping[Role, PoolPlan]) -> PoolPlan | None:
    """The pool whose KV lies on attention workers, where one's does."""
    return next((pool for pool in by_role.values() if pool.kind.attention_workers), None)


def worker_settings(pool: PoolPlan, conditions: Conditions) -> dict[str, Any]:
    """``[attention]`` of a pool's workers, which have KV alone."""
    device = conditions.catalogue[str(pool.kind.attention_device)]
    kv_bytes = int(device.memory_bytes * MEMORY_SHARE)
    return {**attention_settings(pool, conditions), "kv_bytes": kv_bytes}


def instance_settings(pool: PoolPlan, conditions: Conditions) -> dict[str, Any]:
    """``[instance]`` of one pool; KV of all that its devices have beside the weights."""
    kind, shape, element_bytes = pool.kind, conditions.shape, conditions.element_bytes
    if kind.attention_workers:
        own = {"role": kind.role, **attention_kinds.instance_settings(kind, pool.count, shape)}
        return {**conditions.settings.get("instance", {}), **own, **kind.settings}
    device = conditions.catalogue[kind.device]
    tokens = kv_room_tokens(shape, device, kind.tensor, element_bytes, kind.pipeline)
    kv_bytes = tokens * kv_token_bytes(shape, element_bytes)
    own = {"role": kind.role, "kv_bytes": kv_bytes, "swap_bytes": min(SWAP_BYTES, kv_bytes)}
    return {**conditions.settings.get("instance", {}), **own, **kind.settings}


def _settings_text(tree: Mapping[str, Any]) -> str:
    """Raises ConfigError for what no service would start with."""
    config_from_tree(tree)
    return toml_text(tree)


def toml_text(tree: Mapping[str, Any]) -> str:
    return "\n".join(_toml_lines(tree, ())).lstrip("\n") + "\n"


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...], mark: str = "[{}]") -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not _is_table(value)}
    if path and (plain or not table):
        yield ""
        yield mark.format(".".join(path))
    for key, value in plain.items():
        if value is not None:
            yield f"{key} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))
        elif _is_table(value):
            for each in value:
                yield from _toml_lines(each, (*path, key), "[[{}]]")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)
    )


def compose_override(
    by_role: Mapping[Role, PoolPlan], settings: Mapping[str, str], conditions: Conditions
) -> str:
    """For one machine that has all the devices: beside docker-compose.yml, with the profile ``plan``."""
    lines = [
        "# Made by `lamella plan`. From the repository's root:",
        "#",
        "#   LAMELLA_MODELS=/srv/models LAMELLA_MODEL=/models/NAME docker compose -f docker-compose.yml \\",
        "#     -f THIS_FILE --profile plan up -d --build --wait",
        "services:",
        "  # In place of those on CPUs.",
        "  prefill: { deploy: { replicas: 0 } }",
        "  decode: { deploy: { replicas: 0 } }",
    ]
    for name in ("gateway", "scheduler"):
        lines += [
            f"  {name}:",
            f"    command: [serve, {name}, --config, /etc/lamella/lamella.toml]",
            "    configs: [{ source: plan-lamella, target: /etc/lamella/lamella.toml }]",
        ]
    for role, pool in by_role.items():
        lines += _compose_instance(role, pool, conditions)
    apart = attention_pool(by_role)
    if apart is not None:
        lines += _compose_workers(apart)
    lines.append("configs:")
    for name, text in settings.items():
        lines += [f"  plan-{name.removesuffix('.toml')}:", "    content: |"]
        lines += [f"      {line}".rstrip() for line in text.replace("$", "$$").splitlines()]
    return "\n".join(lines) + "\n"


def _compose_instance(role: Role, pool: PoolPlan, conditions: Conditions) -> list[str]:
    """``prefill-gpu`` has all that an instance on GPUs needs; it differs in what it runs and has."""
    return [
        f"  plan-{role}:",
        "    extends: { file: docker-compose.yml, service: prefill-gpu }",
        "    profiles: !override [plan]",
        f"    command: [serve, {role}, --config, /etc/lamella/{role}.toml]",
        f"    configs: [{{ source: plan-{role}, target: /etc/lamella/{role}.toml }}]",
        "    deploy:",
        f"      replicas: {pool.count}",
        "      resources:",
        f"        limits: {{ memory: {_host_gib(conditions)}g }}",
        "        reservations:",
        "          devices: !override",
        f"            - {{ driver: nvidia, count: {pool.kind.own_devices}, capabilities: [gpu] }}",
        *_compose_attention(pool),
    ]


def _compose_attention(pool: PoolPlan) -> list[str]:
    """The variable of docker-compose.yml would win over the file."""
    if not pool.kind.attention_workers:
        return []
    return [f'    environment: {{ LAMELLA_ATTENTION_WORKERS: "{pool.count * pool.kind.attention_workers}" }}']


def _compose_workers(pool: PoolPlan) -> list[str]:
    """Attention workers, of one device each."""
    return [
        "  plan-attention:",
        "    extends: { file: docker-compose.yml, service: attention-gpu }",
        "    profiles: !override [plan]",
        "    command: [serve, attention, --config, /etc/lamella/attention.toml]",
        "    configs: [{ source: plan-attention, target: /etc/lamella/attention.toml }]",
        "    deploy:",
        f"      replicas: {pool.count * pool.kind.attention_workers}",
        "      resources:",
        f"        limits: {{ memory: {HOST_GIB}g }}",
        "        reservations:",
        "          devices: !override",
        "            - { driver: nvidia, count: 1, capabilities: [gpu] }",
    ]


def _host_gib(conditions: Conditions) -> int:
    return HOST_GIB + math.ceil(weight_bytes(conditions.shape, conditions.element_bytes) / GIB)


def kustomization(
    by_role: Mapping[Role, PoolPlan], settings: Mapping[str, str], base: str, conditions: Conditions
) -> str:
    lines = [
        "# Made by `lamella plan`: `kubectl apply -k` of this directory.",
        "# Nodes are to have the label lamella.dev/device, of the devices that they hold.",
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "namespace: lamella",
        "",
        f"resources: [{toml_value(base)}]",
        "",
        "configMapGenerator:",
        "  - name: settings",
        "    behavior: merge",
        f"    files: [{', '.join(settings)}]",
        *_kubernetes_environment(by_role),
        "",
        "replicas:",
    ]
    for role in ROLES:
        count = by_role[role].count if role in by_role else 0
        lines.append(f"  - {{ name: {role}, count: {count} }}")
    apart = attention_pool(by_role)
    workers = 0 if apart is None else apart.count * apart.kind.attention_workers
    lines += [f"  - {{ name: attention, count: {workers} }}", "", "patches:"]
    for role, pool in by_role.items():
        lines += _kubernetes_patch(role, pool.kind.device, pool.kind.own_devices, _host_gib(conditions))
    if apart is not None:
        lines += _kubernetes_patch("attention", str(apart.kind.attention_device), 1, HOST_GIB)
    return "\n".join(lines) + "\n"


def _kubernetes_environment(by_role: Mapping[Role, PoolPlan]) -> list[str]:
    """The base's variable would win over the file."""
    apart = attention_pool(by_role)
    if apart is None:
        return []
    workers = apart.count * apart.kind.attention_workers
    return [
        "  - name: environment",
        "    behavior: merge",
        f"    literals: [LAMELLA_ATTENTION_WORKERS={workers}]",
    ]


def _kubernetes_patch(role: str, device: str, devices: int, host_gib: int) -> list[str]:
    memory = f"{host_gib}Gi"
    return [
        f"  - target: {{ kind: Deployment, name: {role} }}",
        "    patch: |-",
        "      - op: replace",
        "        path: /spec/template/spec/containers/0/args",
        f"        value: [serve, {role}, --config, /etc/lamella/{role}.toml]",
        "      - op: replace",
        "        path: /spec/template/spec/containers/0/resources",
        "        value:",
        f'          requests: {{ cpu: "4", memory: {min(32, host_gib)}Gi, nvidia.com/gpu: {devices} }}',
        f"          limits: {{ memory: {memory}, nvidia.com/gpu: {devices} }}",
        "      - op: add",
        "        path: /spec/template/spec/nodeSelector",
        f"        value: {{ lamella.dev/device: {toml_value(device)} }}",
    ]


def notes_of(pools: Sequence[PoolPlan]) -> Iterator[str]:
    """What the files do not do."""
    wide = [pool for pool in pools if pool.kind.own_devices > 1]
    if wide:
        yield (
            "an instance of lamella's own computes on one device: the files give those of"
            f" {', '.join(pool.kind.hardware for pool in wide)} all of theirs, which its engine does not use"
        )
    for pool in pools:
        if pool.kind.nodes > 1:
            yield f"stages of {pool.kind.hardware} are on several hosts: the files ask one for all devices"
    if any(pool.kind.attention_workers for pool in pools):
        yield (
            "attention.kv_bytes is all of a worker's memory but a tenth: the KV of decode instances that died"
            " is kept beside it, so lower it where they may"
        )
    used = {device for pool in pools for device, _ in pool.kind.parts}
    for name in sorted(used - set(DEVICES)):
        yield f"{name} is a device of your own: the files ask for it as for an NVIDIA GPU"
    for name in sorted(used & OTHER_THAN_NVIDIA):
        yield (
            f"{name} is no NVIDIA GPU, yet the files ask for it as for one, and lamella's engine computes on"
            " none such: they need its driver, its resource in Kubernetes, and an engine of its own"
        )
    if len(used) > 1:
        yield "compose knows no kinds of devices: on one machine with several, name each service's device_ids"
