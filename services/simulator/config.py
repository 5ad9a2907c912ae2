"""What is simulated: a file of the same settings as a mesh's, and tables of its own.

``[cluster]`` says what is served and how instances are linked, each ``[[pool]]`` how many instances of a kind
there are, each ``[[device]]`` what these may be on beside the catalogue's devices, each ``[[fault]]`` what
befalls them, each ``[[scale]]`` when there are to be more or fewer, ``[prediction]`` how well lengths are
predicted, ``[prefix]`` what is kept of prompts, ``[host]`` that one machine runs everything. Every other
section is of ``common.config`` and means what it means live; ``[pool.instance]`` replaces keys of
``[instance]`` for a pool.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from common.config import Config
from common.config_file import config_from_tree, read_toml, told_of
from common.cost import kv_token_bytes
from common.devices import DeviceSpec
from common.errors import ConfigError
from common.messages import Role
from common.phases import missing_phases
from common.profile import Profile, measured_layerwise_min_tokens
from common.shapes import SHAPES, ModelShape
from common.toml_tables import check_keys, read_table
from services.analysis.model_shape import read_shape
from services.hosts.engines import has_remote_attention
from services.simulator.attention_config import (
    GIB,
    MOST_OF_A_POOL,
    AttentionPool,
    AttentionPoolConfig,
    RemoteAttention,
    attention_pool_of,
    in_pool,
    remote_attention_of,
)
from services.simulator.attention_performance import LanePerformance
from services.simulator.devices import device_of, needed_device, read_devices
from services.simulator.fault_config import AnyFault, check_faults
from services.simulator.host_config import HostConfig, check_host
from services.simulator.performance.interface import HeldOutError, PerformanceModel
from services.simulator.performance.opened import open_once
from services.simulator.performance.roofline import Parallelism
from services.simulator.performance.sources import read_source
from services.simulator.prediction import PredictionConfig, check_prediction
from services.simulator.prefixes import PrefixConfig, check_prefix
from services.simulator.stages import stage_token_bytes, stage_weight_bytes

ANY_TOKENS = 1 << 31
"""More than a prompt has."""
DEFAULT_MODEL = "llama3-70b"
MOST_SCHEDULERS = 64
"""Each hears of everything, so that more of them would only be slower."""
POOL_ROLES = (*get_args(Role), "attention")
OWN_TABLES = ("cluster", "pool", "fault", "scale", "prediction", "prefix", "host", "device")


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model`` names a shape (``common.shapes``) or a directory, or ``shape`` gives one; neither:
    llama3-70b. Weights and KV are of ``element_bytes`` each. A device's memory is used up to
    ``memory_share``. So many ``schedulers`` share the calls, and know of each other's bookings after
    ``hop_s``, which is what a message between two services takes. Between instances KV moves at
    ``link_bytes_per_s``, each way, after ``link_latency_s``; between an instance and its host's memory at
    ``host_bytes_per_s``."""

    model: str | None = None
    shape: ModelShape | None = None
    element_bytes: int = 2
    memory_share: float = 0.9
    schedulers: int = 1
    hop_s: float = 0.0002
    link_bytes_per_s: float = 25e9
    link_latency_s: float = 0.0
    host_bytes_per_s: float = 25e9


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``count`` instances that begin with ``role``, each of ``devices`` of a kind that work as one (tensor
    parallelism), or of ``pipeline`` stages of so many, which have a part of the layers each.
    ``is_pipeline_on_network``: stages are on hosts of their own.
    ``kv_tokens``: of KV that one holds; None: what its devices' memory has room for beside the weights.
    ``performance``: where how long its passes take is from (``services.simulator.performance.sources``;
    there must be one), its files beside the configuration.
    ``start_s``: from the wish for one more until that is ready.
    ``instance``: keys of ``[instance]`` that are other here."""

    name: str
    role: Role
    count: int
    performance: dict[str, Any] = {}
    device: str | None = None
    devices: int = 1
    pipeline: int = 1
    is_pipeline_on_network: bool = False
    kv_tokens: int | None = None
    link_bytes_per_s: float | None = None
    start_s: float = 0.0
    instance: dict[str, Any] = {}

    @property
    def all_devices(self) -> int:
        """Of each instance."""
        return self.devices * self.pipeline

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(
            tensor=self.devices,
            pipeline=self.pipeline,
            is_pipeline_on_network=self.is_pipeline_on_network,
        )


AnyPool = TypeVar("AnyPool", PoolConfig, AttentionPoolConfig)


class ScaleStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At ``at_s`` somebody wishes for so many instances of ``pool``: those that are too many drain, the last
    that were started first."""

    at_s: float
    pool: str
    count: int


class Pool(NamedTuple):
    """A pool with its own settings, checked. ``total_blocks``: of each instance. ``held_out``: as
    ``OpenedSource`` has it. ``remote``: where its KV lies on attention workers."""

    config: PoolConfig
    device: DeviceSpec | None
    settings: Config
    total_blocks: int
    performance: PerformanceModel
    held_out: Callable[[], tuple[HeldOutError, ...]]
    remote: RemoteAttention | None = None


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file. ``settings``: of what is no pool's own. ``pools``: of instances; ``attention``: of
    workers."""

    cluster: ClusterConfig
    shape: ModelShape
    settings: Config
    pools: tuple[Pool, ...]
    faults: tuple[AnyFault, ...] = ()
    scale: tuple[ScaleStep, ...] = ()
    prediction: PredictionConfig | None = None
    prefix: PrefixConfig | None = None
    attention: AttentionPool | None = None
    host: HostConfig | None = None

    @property
    def kv_token_bytes(self) -> int:
        return kv_token_bytes(self.shape, self.cluster.element_bytes)


def load_simulated(path: Path) -> Simulated:
    """A whole mesh. Raises ConfigError naming file, key, value and rule."""
    tree = read_toml("CONFIG", path)
    with told_of(path):
        simulated = simulated_from_tree(tree, path.parent)
        roles = [each.config.role for each in simulated.pools]
        if missing := missing_phases(roles):
            rule = f"leave nobody for {' and '.join(missing)}: no request would be answered"
            raise ConfigError("pool.role", ", ".join(roles), rule)
    return simulated


def simulated_from_tree(tree: Mapping[str, Any], beside: Path = Path()) -> Simulated:
    """Files are ``beside`` that folder. Raises ConfigError, PerformanceFileError, ModelError."""
    rest = {key: value for key, value in tree.items() if key not in OWN_TABLES}
    for key, value in rest.items():
        if key in ClusterConfig.__struct_fields__ and not isinstance(value, Mapping):
            raise ConfigError(key, value, "is a key of [cluster], and stands in no table")
    table = tree.get("cluster", {})
    if isinstance(table, Mapping) and table.keys() >= {"model", "shape"}:
        raise ConfigError("cluster.model", table["model"], "cannot be said beside [cluster.shape]")
    if isinstance(table, Mapping):
        check_keys("cluster.shape", table.get("shape"), ModelShape)
    cluster = read_table("cluster", table, ClusterConfig)
    _check_cluster(cluster)
    configs, attention_configs = _pool_configs(tree.get("pool", []))
    shape = _shape_of(cluster, beside)
    named = [(each.name, each.device) for each in configs]
    named += [(each.name, each.device) for each in attention_configs]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1 or not name:
            raise ConfigError("pool.name", name, "each pool needs a name of its own")
    catalogue = read_devices(tree.get("device", []), beside)
    devices = {name: device_of(f"pool.{name}", device, catalogue) for name, device in named}
    settings = config_from_tree(rest)
    own = [_settings_of(each, rest) for each in configs]
    attention = None
    if attention_configs:
        served = zip(configs, own, strict=True)
        instances = sum(each.count for each, its in served if has_remote_attention(its))
        [workers] = attention_configs
        its_device = devices[workers.name]
        attention = attention_pool_of(rest, workers, its_device, settings, cluster, shape, instances, beside)
    pools = tuple(
        _pool_of(each, devices[each.name], its, cluster, shape, attention, beside)
        for each, its in zip(configs, own, strict=True)
    )
    faults = read_table("fault", tree.get("fault", []), tuple[AnyFault, ...])
    scale = read_table("scale", tree.get("scale", []), tuple[ScaleStep, ...])
    of_instances = [each.name for each in configs]
    _check_scale(scale, of_instances)
    may_grow = {step.pool for step in scale} if settings.scaling.policy != "on" else set(of_instances)
    counts = {each.name: None if each.name in may_grow else each.count for each in configs}
    check_faults(faults, counts | {each.name: each.count for each in attention_configs})
    return Simulated(
        cluster=cluster,
        shape=shape,
        settings=settings,
        pools=pools,
        attention=attention,
        faults=faults,
        scale=scale,
        prediction=_prediction_of(tree, settings),
        prefix=_prefix_of(tree),
        host=_host_of(tree, configs),
    )


def _pool_configs(pools: Any) -> tuple[list[PoolConfig], list[AttentionPoolConfig]]:
    """Of instances, and of attention workers."""
    tables: list[dict[str, Any]] = read_table("pool", pools, list[dict[str, Any]])
    attention = [each for each in tables if each.get("role") == "attention"]
    if len(attention) > 1:
        rule = "is one of several pools of role 'attention': every decode instance uses every worker"
        raise ConfigError("pool.name", attention[1].get("name"), rule)
    configs = [_pool_config(each, PoolConfig) for each in tables if each not in attention]
    if not configs:
        raise ConfigError("pool", configs, "at least one [[pool]] is needed")
    return configs, [_pool_config(each, AttentionPoolConfig) for each in attention]


def _pool_config(table: dict[str, Any], kind: type[AnyPool]) -> AnyPool:
    name = table.get("name")
    key = f"pool.{name}" if isinstance(name, str) else "pool"
    if "role" not in table:
        raise ConfigError(f"{key}.role", None, f"must be given, one of {', '.join(POOL_ROLES)}")
    if table["role"] not in POOL_ROLES:
        raise ConfigError(f"{key}.role", table["role"], f"must be one of {', '.join(POOL_ROLES)}")
    found: AnyPool = read_table(key, table, kind)
    return found


def _check_cluster(cluster: ClusterConfig) -> None:
    for field in ("element_bytes", "link_bytes_per_s", "host_bytes_per_s"):
        if not 0 < getattr(cluster, field) < float("inf"):
            raise ConfigError(f"cluster.{field}", getattr(cluster, field), "must be over 0")
    if not 0 < cluster.memory_share <= 1:
        raise ConfigError("cluster.memory_share", cluster.memory_share, "must be over 0 and at most 1")
    if not 1 <= cluster.schedulers <= MOST_SCHEDULERS:
        raise ConfigError("cluster.schedulers", cluster.schedulers, f"must be 1 to {MOST_SCHEDULERS}")
    for field in ("hop_s", "link_latency_s"):
        if not 0 <= getattr(cluster, field) < float("inf"):
            raise ConfigError(f"cluster.{field}", getattr(cluster, field), "must be 0 or more")


def _check_shape(shape: ModelShape) -> None:
    for field, size in dataclasses.asdict(shape).items():
        if isinstance(size, int) and size < 1 and field != "lookup_parameters":
            raise ConfigError(f"cluster.shape.{field}", size, "must be at least 1")
    if shape.heads % shape.kv_heads:
        rule = f"must divide cluster.shape.heads = {shape.heads}"
        raise ConfigError("cluster.shape.kv_heads", shape.kv_heads, rule)
    if not 0 <= shape.lookup_parameters < shape.parameters:
        rule = f"must be 0 or more, and under cluster.shape.parameters = {shape.parameters}"
        raise ConfigError("cluster.shape.lookup_parameters", shape.lookup_parameters, rule)


def _check_scale(steps: Sequence[ScaleStep], pools: Sequence[str]) -> None:
    for number, step in enumerate(steps):
        key = f"scale.{number}"
        if step.pool not in pools:
            raise ConfigError(f"{key}.pool", step.pool, f"must be one of {', '.join(sorted(pools))}")
        if not 0 <= step.at_s < float("inf"):
            raise ConfigError(f"{key}.at_s", step.at_s, "must be 0 or more")
        if step.count < 0:
            raise ConfigError(f"{key}.count", step.count, "must be 0 or more")


def _prediction_of(tree: Mapping[str, Any], settings: Config) -> PredictionConfig | None:
    if settings.predictor.kind == "classifier":
        rule = "must be another here, where prompts have no words: [prediction] has one of a given accuracy"
        raise ConfigError("predictor.kind", settings.predictor.kind, rule)
    if "prediction" not in tree:
        return None
    prediction: PredictionConfig = read_table("prediction", tree["prediction"], PredictionConfig)
    check_prediction(prediction, settings.predictor)
    return prediction


def _prefix_of(tree: Mapping[str, Any]) -> PrefixConfig | None:
    if "prefix" not in tree:
        return None
    prefix: PrefixConfig = read_table("prefix", tree["prefix"], PrefixConfig)
    check_prefix(prefix)
    return prefix


def _host_of(tree: Mapping[str, Any], pools: Sequence[PoolConfig]) -> HostConfig | None:
    if "host" not in tree:
        return None
    host: HostConfig = read_table("host", tree["host"], HostConfig)
    check_host(host)
    for pool in pools:
        if pool.pipeline > 1:
            raise ConfigError(f"pool.{pool.name}.pipeline", pool.pipeline, "must be 1 with a [host]")
    return host


def _shape_of(cluster: ClusterConfig, beside: Path) -> ModelShape:
    if cluster.shape is not None:
        _check_shape(cluster.shape)
        return cluster.shape
    model = DEFAULT_MODEL if cluster.model is None else cluster.model
    if model in SHAPES:
        return SHAPES[model]
    directory = beside / Path(model).expanduser()
    if not directory.is_dir():
        rule = f"must be a model's directory or one of {', '.join(sorted(SHAPES))}; or give [cluster.shape]"
        raise ConfigError("cluster.model", model, rule)
    return read_shape(str(directory), "cluster.model")


def _settings_of(pool: PoolConfig, rest: Mapping[str, Any]) -> Config:
    own = {**rest.get("instance", {}), **pool.instance, "role": pool.role}
    try:
        return config_from_tree({**rest, "instance": own})
    except ConfigError as exc:
        section, _, field = exc.key.partition(".")
        if section != "instance" or field not in pool.instance:
            raise
        raise ConfigError(f"pool.{pool.name}.{exc.key}", exc.value, exc.rule) from exc


def _pool_of(
    pool: PoolConfig,
    device: DeviceSpec | None,
    settings: Config,
    cluster: ClusterConfig,
    shape: ModelShape,
    attention: AttentionPool | None,
    beside: Path,
) -> Pool:
    key = f"pool.{pool.name}"
    for field in ("count", "devices", "pipeline"):
        if not 1 <= getattr(pool, field) <= MOST_OF_A_POOL:
            raise ConfigError(f"{key}.{field}", getattr(pool, field), f"must be 1 to {MOST_OF_A_POOL:,}")
    if pool.pipeline > shape.layers:
        rule = f"must be at most the {shape.layers} layers of {shape.name}"
        raise ConfigError(f"{key}.pipeline", pool.pipeline, rule)
    if not 0 <= pool.start_s < float("inf"):
        raise ConfigError(f"{key}.start_s", pool.start_s, "must be 0 or more")
    if pool.link_bytes_per_s is not None and not pool.link_bytes_per_s > 0:
        raise ConfigError(f"{key}.link_bytes_per_s", pool.link_bytes_per_s, "must be over 0")
    if has_remote_attention(settings):
        return _remote_pool_of(pool, device, settings, cluster, shape, attention, beside)
    tokens = pool.kv_tokens
    if tokens is None:
        tokens = _tokens_beside_weights(key, pool, needed_device(key, device), cluster, shape)
    blocks = tokens // settings.instance.block_size
    if blocks < 1:
        rule = f"must hold at least one block of instance.block_size = {settings.instance.block_size} tokens"
        raise ConfigError(f"{key}.kv_tokens", tokens, rule)
    source = read_source(f"{key}.performance", pool.performance, beside)
    try:
        opened = open_once(source, shape, device, pool.parallelism)
    except ConfigError as exc:
        raise in_pool(key, exc) from exc
    if opened.profile is not None:
        settings = _as_profiled(settings, opened.profile)
    return Pool(pool, device, settings, blocks, opened.model, opened.held_out)


def _as_profiled(settings: Config, profile: Profile) -> Config:
    """What instances on that machine take from its profile, where no setting says otherwise."""
    instance, transfer = settings.instance, settings.transfer
    if instance.chunk_tokens is None:
        instance = msgspec.structs.replace(instance, chunk_tokens=profile.saturation_tokens)
    if transfer.layerwise_min_tokens is None:
        least = measured_layerwise_min_tokens(profile, transfer, ANY_TOKENS)
        transfer = msgspec.structs.replace(transfer, layerwise_min_tokens=least)
    return msgspec.structs.replace(settings, instance=instance, transfer=transfer)


def _remote_pool_of(
    pool: PoolConfig,
    device: DeviceSpec | None,
    settings: Config,
    cluster: ClusterConfig,
    shape: ModelShape,
    workers: AttentionPool | None,
    beside: Path,
) -> Pool:
    if pool.kv_tokens is not None:
        rule = "is of attention workers' pools: with instance.attention_workers an instance holds no KV"
        raise ConfigError(f"pool.{pool.name}.kv_tokens", pool.kv_tokens, rule)
    remote = remote_attention_of(pool, device, settings, cluster, shape, workers, beside)
    assert workers is not None, "remote attention without workers"
    pools = 1 if remote.cost.is_by_heads else workers.config.count
    return Pool(
        pool, device, settings, pools * remote.pool_blocks, LanePerformance(remote, pools), tuple, remote
    )


def _tokens_beside_weights(
    key: str, pool: PoolConfig, device: DeviceSpec, cluster: ClusterConfig, shape: ModelShape
) -> int:
    sizes = (shape, cluster.element_bytes, pool.pipeline)
    memory = pool.devices * device.memory_bytes * cluster.memory_share
    tokens = []
    # The stage that has room for fewest decides.
    for weights, token in zip(stage_weight_bytes(*sizes), stage_token_bytes(*sizes), strict=True):
        if weights >= memory:
            of_stage = "" if pool.pipeline == 1 else f" of one of {pool.pipeline} stages"
            raise ConfigError(
                f"{key}.devices",
                pool.devices,
                f"{shape.name} does not fit: its weights{of_stage} have {weights / GIB:.1f} GiB, and"
                f" {pool.devices} {device.name} have {memory / GIB:.1f} at cluster.memory_share ="
                f" {cluster.memory_share:g}",
            )
        tokens.append(int((memory - weights) / token))
    return min(tokens)
