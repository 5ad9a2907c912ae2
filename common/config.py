"""Settings: one TOML file, a frozen section per role, and the only place that reads the environment.

Order of precedence: command line (applied by the CLI with ``msgspec.structs.replace``), environment,
file, default. An unknown key or an impossible value fails at start and names key, value and rule.
Measured values are results and do not belong here.
"""

import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.errors import ConfigError
from common.ids import is_valid_id
from common.messages import Role

Dtype = Literal["bf16", "fp32"]
Weights = Literal["model", "int8", "w8a8"]
PrefillOrder = Literal["fcfs", "sjf", "ljf"]
AttentionPartition = Literal["heads", "requests"]
Kernels = Literal["auto", "torch"]
Pipeline = Literal["off", "fixed", "rotational"]
TransferPath = Literal["auto", "mooncake", "shared_memory"]
TransferProtocol = Literal["tcp", "rdma", "nvlink"]


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service of one mesh agrees on. ``lease_s``: how long a silent member still counts."""

    namespace: str = "default"
    nats_url: str = "nats://127.0.0.1:4222"
    redis_url: str = "redis://127.0.0.1:6379/0"
    lease_s: float = 3.0
    heartbeat_s: float = 1.0
    call_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side of one process. ``service_id`` None makes one from role and a random part.

    ``port`` 0 asks the system for a free one. ``advertise_host`` is how others reach this machine.
    """

    service_id: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = "127.0.0.1"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and where converted weights and captured programs are kept.

    ``directory`` None is the embedded default model. ``dtype`` and ``weights``: see
    ``common.model.precision`` and ``common.model.linears``. ``context_length`` None is
    the model's own. ``threads`` None uses the cores that no other
    instance of this machine uses at the time. ``kernels`` auto compiles those of few rows on a CPU
    (``common.model.cpu``); torch leaves everything to torch.
    """

    directory: Path | None = None
    cache_directory: Path = Path("~/.cache/lamella")
    dtype: Dtype = "bf16"
    device: str = "cpu"
    context_length: int | None = None
    weights: Weights = "model"
    threads: int | None = None
    kernels: Kernels = "auto"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one client may ask for, and how long anybody waits.

    Sizes are bytes, characters or counts. ``header_timeout_s`` bounds a request's head,
    ``token_timeout_s`` the wait for a stream's next token, ``slow_reader_timeout_s`` a client that takes
    nothing; ``keep_alive_comment_s`` of silence are bridged by an SSE comment. A sequence that breaks is
    continued at most ``max_continuations`` times.
    """

    max_body_bytes: int = 1 << 20
    max_choices: int = 8
    max_stop_strings: int = 32
    max_stop_characters: int = 256
    max_open_requests: int = 2048
    tokenizer_threads: int = 2
    slow_reader_timeout_s: float = 30.0
    token_timeout_s: float = 600.0
    keep_alive_comment_s: float = 15.0
    header_timeout_s: float = 10.0
    max_continuations: int = 3


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queue bounds of early rejection: prompt tokens waiting per prefill instance, requests per decode."""

    max_pending_prefill_tokens: int = 65_536
    max_requests_per_decode: int = 512
    dispatch_attempts: int = 3


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance: its role, its KV pool, and how its two rooms batch.

    ``kv_bytes`` sizes the pool, ``block_size`` is tokens per block (1 = token granularity).
    ``chunk_tokens`` is TetriInfer's fixed ChunkSize (3.3.3), ``prefill_order`` and
    ``scheduling_window`` its PrefillSchedBatch policies (3.3.1). ``engine`` emulated replaces the model
    by a cost model (see EmulationConfig).

    ``attention_workers`` is how many hold the KV of every decode instance and compute its attention; 0: it
    does so itself. ``attention_partition``: each has some KV heads of every sequence, or every head of some
    sequences (Lamina 2, section 5). ``attention_mini_batches``: a step's exchange in so many parts, so that
    one is on its way while another is computed (Lamina 1, 5.2.1). ``pipeline``: batches take turns, one
    computes its slices while another is at attention (Lamina 2, 4.3).
    """

    role: Role = "prefill"
    kv_bytes: int = 1 << 30
    block_size: int = 256
    chunk_tokens: int = 512
    prefill_order: PrefillOrder = "fcfs"
    scheduling_window: int = 16
    max_decode_batch: int = 64
    max_waiting_requests: int = 1024
    attention_workers: int = 0
    attention_partition: AttentionPartition = "heads"
    attention_mini_batches: int = 1
    pipeline: Pipeline = "off"
    report_interval_s: float = 0.1
    engine: Literal["model", "emulated"] = "model"


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attention worker: bytes of KV, shared out evenly among so many ``decode_instances``, and the most
    bytes through which one of these may ask it."""

    kv_bytes: int = 1 << 30
    exchange_bytes: int = 64 << 20
    decode_instances: int = 1


class EmulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The emulated engine's cost model: a step takes ``base + per_token * tokens + per_context * context``.

    Seconds. ``total_blocks`` fixes the pool, since no bytes need to be held.
    """

    prefill_base_s: float = 0.002
    prefill_per_token_s: float = 0.00005
    decode_base_s: float = 0.005
    decode_per_sequence_s: float = 0.0
    decode_per_context_token_s: float = 0.0
    total_blocks: int = 4096
    vocab_size: int = 49_152
    context_length: int = 8192


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV moves. ``path`` auto picks shared memory on one host and Mooncake between hosts.

    ``emulated_bandwidth_bytes_per_s`` and ``emulated_latency_s`` slow a link down for experiments
    (TetriInfer 4). Ports bound Mooncake's two listening sockets.
    """

    path: TransferPath = "auto"
    protocol: TransferProtocol = "tcp"
    host: str = "127.0.0.1"
    min_port: int = 20_000
    max_port: int = 32_000
    deadline_s: float = 60.0
    emulated_bandwidth_bytes_per_s: float | None = None
    emulated_latency_s: float = 0.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole configuration file."""

    mesh: MeshConfig = MeshConfig()
    service: ServiceConfig = ServiceConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    instance: InstanceConfig = InstanceConfig()
    attention: AttentionConfig = AttentionConfig()
    emulation: EmulationConfig = EmulationConfig()
    transfer: TransferConfig = TransferConfig()


ENVIRONMENT: dict[str, tuple[str, str]] = {
    "NATS_URL": ("mesh", "nats_url"),
    "REDIS_URL": ("mesh", "redis_url"),
    "LAMELLA_NAMESPACE": ("mesh", "namespace"),
    "LAMELLA_SERVICE_ID": ("service", "service_id"),
    "LAMELLA_HOST": ("service", "host"),
    "LAMELLA_PORT": ("service", "port"),
    "LAMELLA_ADVERTISE_HOST": ("service", "advertise_host"),
    "LAMELLA_MODEL": ("model", "directory"),
    "LAMELLA_CACHE": ("model", "cache_directory"),
    "LAMELLA_DTYPE": ("model", "dtype"),
    "LAMELLA_DEVICE": ("model", "device"),
    "LAMELLA_THREADS": ("model", "threads"),
    "LAMELLA_ROLE": ("instance", "role"),
    "LAMELLA_ATTENTION_WORKERS": ("instance", "attention_workers"),
    "LAMELLA_TRANSFER_HOST": ("transfer", "host"),
}
"""Every variable that is read, and the key it sets."""


def load_config(path: Path | None, environment: Mapping[str, str] | None = None) -> Config:
    """Reads, overlays the environment, checks. Raises ConfigError naming key, value and rule."""
    environment = os.environ if environment is None else environment
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ConfigError("--config", str(path), f"cannot be read ({exc.strerror})") from exc
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError("--config", str(path), f"is not TOML: {exc}") from exc
        except UnicodeDecodeError as exc:
            raise ConfigError("--config", str(path), "is not TOML: it is not UTF-8 text") from exc
    for variable, (section, key) in ENVIRONMENT.items():
        values = tree.setdefault(section, {}) if variable in environment else None
        # A section that is no table is for the conversion to refuse.
        if isinstance(values, dict):
            values[key] = environment[variable]
    return config_from_tree(tree)


def config_from_tree(tree: Mapping[str, Any]) -> Config:
    """Builds and checks a Config from nested tables. Raises ConfigError."""
    try:
        config = msgspec.convert(tree, Config, strict=False, dec_hook=_decode_path)
    except msgspec.ValidationError as exc:
        raise _conversion_error(tree, str(exc)) from exc
    check_config(config)
    return config


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``load_config`` reads back to an equal value."""
    lines: list[str] = []
    for section in config.__struct_fields__:
        lines.append(f"[{section}]")
        values = getattr(config, section)
        for key in values.__struct_fields__:
            value = getattr(values, key)
            if value is None:
                continue
            encoded = str(value) if isinstance(value, Path) else value
            # JSON's text is TOML's, but for one character that TOML wants escaped.
            text = msgspec.json.encode(encoded).decode().replace("\x7f", "\\u007f")
            lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)


OVER_ZERO = (  # or not set
    "mesh.heartbeat_s",
    "mesh.call_timeout_s",
    "mesh.drain_timeout_s",
    "instance.report_interval_s",
    "transfer.deadline_s",
    "transfer.emulated_bandwidth_bytes_per_s",
    "gateway.slow_reader_timeout_s",
    "gateway.token_timeout_s",
    "gateway.keep_alive_comment_s",
    "gateway.header_timeout_s",
)
AT_LEAST_ONE = (
    "attention.kv_bytes",
    "attention.exchange_bytes",
    "attention.decode_instances",
    "instance.attention_mini_batches",
    "instance.block_size",
    "instance.chunk_tokens",
    "instance.scheduling_window",
    "instance.max_decode_batch",
    "instance.max_waiting_requests",
    "instance.kv_bytes",
    "model.threads",
    "model.context_length",
    "gateway.max_body_bytes",
    "gateway.max_choices",
    "gateway.max_stop_characters",
    "gateway.max_open_requests",
    "gateway.tokenizer_threads",
    "scheduler.max_pending_prefill_tokens",
    "scheduler.max_requests_per_decode",
    "scheduler.dispatch_attempts",
    "emulation.total_blocks",
    "emulation.vocab_size",
    "emulation.context_length",
)
NOT_NEGATIVE = (
    "instance.attention_workers",
    "gateway.max_stop_strings",
    "gateway.max_continuations",
    "emulation.prefill_base_s",
    "emulation.prefill_per_token_s",
    "emulation.decode_base_s",
    "emulation.decode_per_sequence_s",
    "emulation.decode_per_context_token_s",
    "transfer.emulated_latency_s",
)


def check_config(config: Config) -> None:
    """Rules that a type cannot say. Raises ConfigError."""

    def require(key: str, rule: str, holds: Callable[[Any], bool]) -> None:
        section, field = key.split(".")
        value = getattr(getattr(config, section), field)
        if not holds(value):
            raise ConfigError(key, value, rule)

    require("mesh.namespace", "must match [a-z0-9-]{1,64}", is_valid_id)
    require("service.service_id", "must match [a-z0-9-]{1,64}", lambda v: v is None or is_valid_id(v))
    require("service.port", "must be 0..65535", lambda v: 0 <= v <= 65_535)
    for section, field in _floats(config):
        require(f"{section}.{field}", "must be a finite number", math.isfinite)
    for key in OVER_ZERO:
        require(key, "must be over 0", lambda v: v is None or v > 0)
    for key in NOT_NEGATIVE:
        require(key, "must be 0 or more", lambda v: v >= 0)
    for key in AT_LEAST_ONE:
        require(key, "must be at least 1", lambda v: v is None or v >= 1)
    for key in ("transfer.min_port", "transfer.max_port"):
        require(key, "must be 1..65535", lambda v: 1 <= v <= 65_535)
    require(
        "mesh.lease_s",
        f"must be at least 2 x mesh.heartbeat_s = {2 * config.mesh.heartbeat_s}",
        lambda v: v >= 2 * config.mesh.heartbeat_s,
    )
    require(
        "transfer.max_port",
        f"must be over transfer.min_port = {config.transfer.min_port}",
        lambda v: v > config.transfer.min_port,
    )
    require(
        "transfer.path",
        f"shared_memory cannot be combined with transfer.protocol = {config.transfer.protocol!r}",
        lambda v: not (v == "shared_memory" and config.transfer.protocol != "tcp"),
    )


def _floats(config: Config) -> Iterator[tuple[str, str]]:
    """Section and field of every float."""
    for section in config.__struct_fields__:
        values = getattr(config, section)
        for field in values.__struct_fields__:
            if isinstance(getattr(values, field), float):
                yield section, field


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise TypeError("must be the text of a path")


def _conversion_error(tree: Mapping[str, Any], text: str) -> ConfigError:
    """msgspec says ``Expected `int`, got `str` - at `$.instance.block_size` ``: find key and value in it."""
    rule, _, location = text.partition(" - at `$")
    key = location.rstrip("`").lstrip(".")
    if rule.startswith("Object contains unknown field"):
        field = rule.split("`")[1]
        key = f"{key}.{field}" if key else field
        rule = "is not a known key"
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return ConfigError(key or "(file)", value, rule)
