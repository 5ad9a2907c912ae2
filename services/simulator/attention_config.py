"""Attention workers of a simulated mesh, as a file has them: ``[[pool]] role = "attention"``.

How they are used is what ``[instance]`` says of decode pools (``attention_workers``, ``attention_partition``,
``attention_mini_batches``, ``attention_moves``, ``pipeline``, ``staggered_batches``), and means what it means
live; what one has for each decode instance is what the live worker's state says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from attention.state import AttentionState, BindArrived, StartServing
from common.config import Config
from common.cost import kv_token_bytes, weight_bytes
from common.devices import DeviceSpec
from common.errors import ConfigError, InvalidRequest, Overloaded
from common.ids import BindingId, Incarnation, InstanceId
from common.kv.layout import KVLayout
from common.messages import InstanceLife
from common.messages.attention import BindAttention
from common.shapes import ModelShape
from common.spec import AttentionSpec, ElementType
from decode.attention_needs import AttentionNeeds
from scheduler.policy.staggering import Staggering
from services.simulator.attention_cost import AttentionCost, Wire, kv_share_of
from services.simulator.devices import needed_device
from services.simulator.performance.roofline import Parallelism
from services.simulator.performance.sources import read_source
from services.simulator.performance.split import SplitModel, open_split

if TYPE_CHECKING:
    from services.simulator.config import ClusterConfig, PoolConfig

CONTEXT_LENGTH = 131_072
"""For which workers' exchanges are made where ``[model] context_length`` does not say."""
ELEMENT_TYPES: dict[int, ElementType] = {2: "bfloat16", 4: "float32"}
GIB = float(1 << 30)
MOST_OF_A_POOL = 10_000
"""Instances or workers, devices, stages."""
POOL_KEYS = {"tensor_parallel": "devices", "pipeline_parallel": "pipeline"}
"""A pool's own, by what performance models call them."""
POOLS_OWN = {"device", "devices", "pipeline", "kv_tokens"}
"""Of what performance models refuse, that which is no key of a performance."""


class AttentionPoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``count`` attention workers, each of ``devices`` of a kind. ``kv_tokens``: whole ones that one worker
    has memory for; None: what its devices hold, as there are no weights. ``performance``: of which the
    attention operator counts. ``link_latency_s``: one way between a worker and a decode instance; None: the
    cluster's."""

    name: str
    role: Literal["attention"]
    count: int
    performance: dict[str, Any] = {}
    device: str | None = None
    devices: int = 1
    kv_tokens: int | None = None
    link_bytes_per_s: float | None = None
    link_latency_s: float | None = None


class AttentionPool(NamedTuple):
    """Checked. ``kv_bytes``: of each worker, shared out among ``decode_instances``."""

    config: AttentionPoolConfig
    device: DeviceSpec | None
    performance: SplitModel
    kv_bytes: int
    exchange_bytes: int
    decode_instances: int
    link_bytes_per_s: float
    link_latency_s: float

    def new_state(self, worker_id: str) -> AttentionState:
        return AttentionState(worker_id, self.kv_bytes, self.exchange_bytes, self.decode_instances)


class RemoteAttention(NamedTuple):
    """Of a decode pool whose KV lies on attention workers. ``pool_blocks``: of each of its KV pools."""

    needs: AttentionNeeds
    cost: AttentionCost
    turns: Staggering
    pool_blocks: int


def attention_pool_of(
    tree: Mapping[str, Any],
    pool: AttentionPoolConfig,
    device: DeviceSpec | None,
    settings: Config,
    cluster: "ClusterConfig",
    shape: ModelShape,
    instances: int,
    beside: Path,
) -> AttentionPool:
    """``instances``: of decode, that are to be served. Raises ConfigError."""
    key = f"pool.{pool.name}"
    for field in ("count", "devices"):
        if not 1 <= getattr(pool, field) <= MOST_OF_A_POOL:
            raise ConfigError(f"{key}.{field}", getattr(pool, field), f"must be 1 to {MOST_OF_A_POOL:,}")
    if pool.link_bytes_per_s is not None and not pool.link_bytes_per_s > 0:
        raise ConfigError(f"{key}.link_bytes_per_s", pool.link_bytes_per_s, "must be over 0")
    if pool.link_latency_s is not None and not 0 <= pool.link_latency_s < float("inf"):
        raise ConfigError(f"{key}.link_latency_s", pool.link_latency_s, "must be 0 or more")
    if cluster.element_bytes not in ELEMENT_TYPES:
        rule = "must be 2 or 4 with attention workers: what is exchanged with them is bfloat16 or float32"
        raise ConfigError("cluster.element_bytes", cluster.element_bytes, rule)
    if not instances:
        rule = "holds nobody's KV: set instance.attention_workers for a pool of role decode"
        raise ConfigError(f"{key}.role", pool.role, rule)
    served = instances
    if "decode_instances" in tree.get("attention", {}):
        served = settings.attention.decode_instances
        if served < instances:
            rule = f"must be at least the {instances} decode instances that each worker serves"
            raise ConfigError("attention.decode_instances", served, rule)
    if pool.kv_tokens is not None:
        kv_bytes = pool.kv_tokens * kv_token_bytes(shape, cluster.element_bytes)
    else:
        memory_bytes = needed_device(key, device).memory_bytes
        kv_bytes = int(pool.devices * memory_bytes * cluster.memory_share)
    return AttentionPool(
        config=pool,
        device=device,
        performance=split_of(key, pool.performance, shape, device, pool.devices, beside),
        kv_bytes=kv_bytes,
        exchange_bytes=settings.attention.exchange_bytes,
        decode_instances=served,
        link_bytes_per_s=pool.link_bytes_per_s or cluster.link_bytes_per_s,
        link_latency_s=cluster.link_latency_s if pool.link_latency_s is None else pool.link_latency_s,
    )


def remote_attention_of(
    pool: "PoolConfig",
    device: DeviceSpec | None,
    settings: Config,
    cluster: "ClusterConfig",
    shape: ModelShape,
    workers: AttentionPool | None,
    beside: Path,
) -> RemoteAttention:
    """Raises ConfigError where the live services would not start so, or the weights do not fit."""
    key, instance = f"pool.{pool.name}", settings.instance
    if workers is None:
        rule = "needs a [[pool]] of role 'attention' to bind them from"
        raise ConfigError(f"{key}.instance.attention_workers", instance.attention_workers, rule)
    if workers.config.count < instance.attention_workers:
        rule = (
            f"must be at least the instance.attention_workers = {instance.attention_workers} of {pool.name}"
        )
        raise ConfigError(f"pool.{workers.config.name}.count", workers.config.count, rule)
    needs = _needs_of(settings, cluster, shape, workers)
    try:
        needs.check()
    except ConfigError as exc:
        raise ConfigError(f"{key}.{exc.key}", exc.value, exc.rule) from exc
    if device is not None:
        _check_weights(key, pool, cluster, shape, device)
    own_bytes_per_s = pool.link_bytes_per_s or cluster.link_bytes_per_s
    element_bytes = cluster.element_bytes
    cost = AttentionCost(
        layers=shape.layers,
        kv_share=kv_share_of(shape),
        model=split_of(key, pool.performance, shape, device, pool.devices, beside),
        attention=workers.performance,
        wire=Wire(
            q_bytes=shape.heads * shape.head_dim * element_bytes,
            kv_bytes=2 * shape.kv_heads * shape.head_dim * element_bytes,
            instance_bytes_per_s=own_bytes_per_s,
            worker_bytes_per_s=workers.link_bytes_per_s,
            latency_s=workers.link_latency_s,
        ),
        is_by_heads=needs.partition == "heads",
        mini_batches=needs.mini_batches,
    )
    turns = Staggering(needs.lanes, is_fixed=instance.pipeline == "fixed")
    return RemoteAttention(needs, cost, turns, _pool_blocks(needs, workers))


def bind_message(
    needs: AttentionNeeds, index: int, life: InstanceLife, binding_id: BindingId
) -> BindAttention:
    """As ``decode.binding`` asks: for the pool's worker with that number."""
    share = needs.share(index)
    return BindAttention(
        binding_id=binding_id,
        decode_instance=life.instance_id,
        decode_incarnation=life.incarnation,
        layout=share.layout,
        first_head=share.kv_heads.start,
        attention_specs=share.attention_specs,
        shape=share.shape,
        lanes=needs.lanes,
        endpoint=b"",
        salt=0,
    )


def split_of(
    key: str,
    performance: Mapping[str, object],
    shape: ModelShape,
    device: DeviceSpec | None,
    devices: int,
    beside: Path,
) -> SplitModel:
    source = read_source(f"{key}.performance", performance, beside)
    try:
        return open_split(source, shape, device, Parallelism(tensor=devices))
    except ConfigError as exc:
        raise in_pool(key, exc) from exc


def in_pool(key: str, error: ConfigError) -> ConfigError:
    """What a performance model refuses, by the keys of the pool's own table and of its performance's."""
    own = POOL_KEYS.get(error.key, error.key)
    place = key if own in POOLS_OWN else f"{key}.performance"
    return ConfigError(f"{place}.{own}", error.value, error.rule)


def _needs_of(
    settings: Config, cluster: "ClusterConfig", shape: ModelShape, workers: AttentionPool
) -> AttentionNeeds:
    instance = settings.instance
    layout = KVLayout(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=instance.block_size,
        element_bytes=cluster.element_bytes,
    )
    by_heads = instance.attention_partition == "heads"
    held_bytes = workers.kv_bytes * (instance.attention_workers if by_heads else 1)
    held_tokens = held_bytes // workers.decode_instances // layout.token_bytes
    spec = AttentionSpec(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    return AttentionNeeds(
        heads=shape.heads,
        layout=layout,
        attention_specs=(spec,) * shape.layers,
        element_type=ELEMENT_TYPES[cluster.element_bytes],
        context_length=max(1, min(settings.model.context_length or CONTEXT_LENGTH, held_tokens)),
        max_batch=instance.max_decode_batch,
        workers=instance.attention_workers,
        partition=instance.attention_partition,
        mini_batches=instance.attention_mini_batches,
        lanes=1 if instance.pipeline == "off" else instance.staggered_batches,
    )


def _check_weights(
    key: str, pool: "PoolConfig", cluster: "ClusterConfig", shape: ModelShape, device: DeviceSpec
) -> None:
    weights = weight_bytes(shape, cluster.element_bytes)
    memory = int(pool.devices * device.memory_bytes * cluster.memory_share)
    if weights > memory:
        raise ConfigError(
            f"{key}.devices",
            pool.devices,
            f"{shape.name} does not fit: its weights have {weights / GIB:.1f} GiB, and {pool.devices}"
            f" {device.name} have {memory / GIB:.1f} at cluster.memory_share = {cluster.memory_share:g}",
        )


def _pool_blocks(needs: AttentionNeeds, workers: AttentionPool) -> int:
    """What a worker answers who is asked. Raises ConfigError for what it refuses."""
    life = InstanceLife(InstanceId("decode"), Incarnation("first"))
    bind = bind_message(needs, 0, life, BindingId("first"))
    try:
        commands = workers.new_state("attention").handle(BindArrived(bind))
    except (InvalidRequest, Overloaded) as exc:
        raise ConfigError("attention", workers.config.name, exc.message) from exc
    [start] = (each for each in commands if isinstance(each, StartServing))
    return start.total_blocks
