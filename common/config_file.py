"""Settings read from one TOML file and the environment, checked, and written again.

The only place that reads settings from the environment. Order of precedence: command line (applied by the CLI
with ``msgspec.structs.replace``), environment, file, default. An unknown key or an impossible value fails at
start and names key, value and rule.
"""

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import le
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from common.config import Config
from common.errors import ConfigError
from common.ids import is_valid_id
from common.scaling import ScaledService
from common.secret_files import with_secrets

ENVIRONMENT: dict[str, tuple[str, str]] = {
    "NATS_URL": ("mesh", "nats_url"),
    "REDIS_URL": ("mesh", "redis_url"),
    "LAMELLA_NAMESPACE": ("mesh", "namespace"),
    "LAMELLA_SERVICE_ID": ("service", "service_id"),
    "LAMELLA_HOST": ("service", "host"),
    "LAMELLA_PORT": ("service", "port"),
    "LAMELLA_ADVERTISE_HOST": ("service", "advertise_host"),
    "LAMELLA_VLLM_METRICS": ("service", "vllm_metrics"),
    "LAMELLA_PRIVATE_HOST": ("gateway", "private_host"),
    "LAMELLA_PRIVATE_PORT": ("gateway", "private_port"),
    "LAMELLA_ADMIN_KEY_FILE": ("gateway", "admin_key_file"),
    "LAMELLA_API_KEYS_FILE": ("gateway", "api_keys_file"),
    "LAMELLA_MODEL": ("model", "directory"),
    "LAMELLA_CACHE": ("model", "cache_directory"),
    "LAMELLA_DTYPE": ("model", "dtype"),
    "LAMELLA_DEVICE": ("model", "device"),
    "LAMELLA_THREADS": ("model", "threads"),
    "LAMELLA_PREDICTOR": ("predictor", "kind"),
    "LAMELLA_ROLE": ("instance", "role"),
    "LAMELLA_ATTENTION_WORKERS": ("instance", "attention_workers"),
    "LAMELLA_ATTENTION_DEVICE": ("attention", "device"),
    "LAMELLA_TRANSFER_HOST": ("transfer", "host"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("telemetry", "otlp_endpoint"),
}
"""Every variable that is read, and the key it sets; ``common.secret_files`` reads some from files."""


def load_config(path: Path | None, environment: Mapping[str, str] | None = None) -> Config:
    """Reads, overlays the environment, checks. Raises ConfigError naming key, value and rule."""
    config = _convert(_read_tree(path, environment), is_text=True)
    check_config(config)
    return config


class NamedServers(NamedTuple):
    """None: nobody says which, so that a mesh on one machine brings its own."""

    nats_url: str | None
    redis_url: str | None


def load_named_servers(path: Path | None, environment: Mapping[str, str] | None = None) -> NamedServers:
    """Those that file or environment name, also where they are the default. Raises as ``load_config``."""
    named = _read_tree(path, environment).get("mesh", {})
    mesh = load_config(path, environment).mesh
    return NamedServers(
        mesh.nats_url if "nats_url" in named else None, mesh.redis_url if "redis_url" in named else None
    )


def _read_tree(path: Path | None, environment: Mapping[str, str] | None) -> dict[str, Any]:
    """What is set, by section and key. Raises ConfigError for a file that is not one of settings."""
    environment = with_secrets(os.environ if environment is None else environment)
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
    _convert(tree, is_text=False)
    for variable, (section, key) in ENVIRONMENT.items():
        if variable in environment:
            tree.setdefault(section, {})[key] = environment[variable]
    return tree


def config_from_tree(tree: Mapping[str, Any]) -> Config:
    """Builds and checks a Config from nested tables. Raises ConfigError."""
    config = _convert(tree, is_text=False)
    check_config(config)
    return config


def _convert(tree: Mapping[str, Any], *, is_text: bool) -> Config:
    """``is_text``: numbers may be texts, as the environment's are. TOML has types, where 1 is not true."""
    try:
        return msgspec.convert(tree, Config, strict=not is_text, dec_hook=_decode_path)
    except msgspec.ValidationError as exc:
        raise _conversion_error(tree, str(exc)) from exc


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``load_config`` reads back to an equal value."""
    lines: list[str] = []
    for section in config.__struct_fields__:
        values = getattr(config, section)
        lines.append(f"[{section}]")
        if not isinstance(values, dict):
            lines += [*_keys_of(values), ""]
            continue
        for name, each in values.items():
            lines += [f"[{section}.{name}]", *_keys_of(each), ""]
    return "\n".join(lines)


def _keys_of(table: msgspec.Struct) -> Iterator[str]:
    for key in table.__struct_fields__:
        value = getattr(table, key)
        if value is None:
            continue
        encoded = str(value) if isinstance(value, Path) else value
        # JSON's text is TOML's, but for one character that TOML wants escaped.
        text = msgspec.json.encode(encoded).decode().replace("\x7f", "\\u007f")
        yield f"{key} = {text}"


OVER_ZERO = (
    "instance.mixed_max_wait_s",
    "predictor.timeout_s",
    "scheduler.max_prefill_wait_s",
    "scaling.window_s",
    "roles.look_s",
    "roles.overflow_queue_s",
    "roles.idle_s",
    # or not set
    "mesh.heartbeat_s",
    "mesh.call_timeout_s",
    "mesh.drain_timeout_s",
    "instance.report_interval_s",
    "transfer.deadline_s",
    "transfer.emulated_bandwidth_bytes_per_s",
    "gateway.slow_reader_timeout_s",
    "gateway.token_timeout_s",
    "gateway.bus_timeout_s",
    "gateway.keep_alive_comment_s",
    "gateway.header_timeout_s",
    "gateway.body_timeout_s",
)
SCALED_SERVICES: tuple[str, ...] = get_args(ScaledService)
DEVICE = re.compile("cpu|cuda(:[0-9]{1,2})?")

AT_LEAST_ONE = (
    "roles.overflow_queue_tokens",
    "roles.min_prefill",
    "roles.min_decode",
    "attention.kv_bytes",
    "attention.exchange_bytes",
    "attention.decode_instances",
    "instance.attention_mini_batches",
    "instance.attention_move_gain_tokens",
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
    "scheduler.max_deferred_requests",
    "scheduler.bind_below_tokens",
    "scheduler.dispatch_attempts",
    "scheduler.decisions_kept",
    *(f"scaling.min_{service}" for service in SCALED_SERVICES),
    "emulation.total_blocks",
    "emulation.vocab_size",
    "emulation.context_length",
    "transfer.layerwise_min_tokens",
)
NOT_NEGATIVE = (
    "instance.prefill_aging_tokens_per_s",
    "instance.swap_bytes",
    "instance.attention_workers",
    "instance.attention_moves",
    "gateway.max_stop_strings",
    "gateway.max_continuations",
    "scaling.up_cooldown_s",
    "roles.cool_down_s",
    "roles.settle_s",
    "roles.repurpose_s",
    "scaling.down_after_s",
    "scaling.down_margin",
    "emulation.prefill_base_s",
    "emulation.prefill_per_token_s",
    "emulation.decode_base_s",
    "emulation.decode_per_sequence_s",
    "emulation.decode_per_context_token_s",
    "transfer.emulated_latency_s",
)
SHARES = (
    "telemetry.sampled_share",
    "transfer.pull_share",
    "roles.overflow_kv_share",
    "roles.return_share",
    "roles.idle_share",
    "roles.loaded_share",
)
HOSTS = ("service.host", "service.advertise_host", "gateway.private_host", "transfer.host")
NATS_SCHEMES = ("nats", "tls")
REDIS_SCHEMES = ("redis", "rediss", "unix")

MOST_CLASSES = 16
"""Each has series of its own in every metric of latency."""
MOST_BATCHES = 16
"""Each has a lane at every attention worker, and most have a replica's thread."""


def check_config(config: Config) -> None:
    """Rules that a type cannot say. Raises ConfigError."""

    def require(key: str, rule: str, holds: Callable[[Any], bool]) -> None:
        section, field = key.split(".")
        value = getattr(getattr(config, section), field)
        if not holds(value):
            raise ConfigError(key, value, rule)

    require("mesh.namespace", "must match [a-z0-9-]{1,64}", is_valid_id)
    require("service.service_id", "must match [a-z0-9-]{1,64}", lambda v: v is None or is_valid_id(v))
    for key in ("service.port", "gateway.private_port"):
        require(key, "must be 0..65535", lambda v: 0 <= v <= 65_535)
    require(
        "gateway.private_port",
        f"must not be service.port = {config.service.port}: what is private is not for clients",
        lambda v: v == 0 or v != config.service.port,
    )
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
    require("scheduler.shadow_share", "must be 0..0.1", lambda v: 0 <= v <= 0.1)
    for key in SHARES:
        require(key, "must be over 0 and at most 1", lambda v: 0 < v <= 1)
    for key in HOSTS:
        require(key, "must name a host: an empty one is every address of this machine", bool)
    check_url("mesh.nats_url", config.mesh.nats_url, NATS_SCHEMES)
    check_url("mesh.redis_url", config.mesh.redis_url, REDIS_SCHEMES)
    if config.telemetry.otlp_endpoint is not None:
        check_url("telemetry.otlp_endpoint", config.telemetry.otlp_endpoint, ("http", "https"))
    # A flip would be mended by an instance that starts, and one that drains.
    require(
        "scaling.policy",
        f"on cannot be combined with roles.policy = {config.roles.policy!r}: both change counts",
        lambda v: v != "on" or config.roles.policy == "fixed",
    )
    require("scaling.utilisation", "must be over 0 and under 1", lambda v: 0 < v < 1)
    for service in SCALED_SERVICES:
        least: int = getattr(config.scaling, f"min_{service}")
        rule = f"must be at least scaling.min_{service} = {least}"
        require(f"scaling.max_{service}", rule, partial(le, least))
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
    is_fixed = config.instance.pipeline == "fixed"
    replicas = config.instance.staggered_batches - (not is_fixed)
    require(
        "instance.staggered_batches",
        f"must be 2..{MOST_BATCHES}: n batches take turns, fixed on n model replicas or rotating over n - 1",
        lambda v: 2 <= v <= MOST_BATCHES,
    )
    require(
        "instance.replica_devices",
        f"must be one device for each of instance.staggered_batches{'' if is_fixed else ' - 1'} = {replicas}"
        f" model replicas, the first of them model.device = {config.model.device!r}; or none",
        lambda v: not v or (len(v) == replicas and v[0] == config.model.device),
    )
    require("attention.device", "must be cpu, cuda or cuda:N", lambda v: DEVICE.fullmatch(v) is not None)
    require(
        "attention.device",
        "must be cpu with transfer.path = 'shared_memory': nobody can map a device's memory",
        lambda v: v == "cpu" or config.transfer.path != "shared_memory",
    )
    source = {"classifier": "predictor.directory", "oracle": "predictor.lengths_file"}.get(
        config.predictor.kind
    )
    if source is not None:
        rule = f"must be set with predictor.kind = {config.predictor.kind!r}"
        require(source, rule, lambda v: v is not None)
    require(
        "transfer.path",
        f"shared_memory cannot be combined with transfer.protocol = {config.transfer.protocol!r}",
        lambda v: not (v == "shared_memory" and config.transfer.protocol != "tcp"),
    )
    _check_classes(config)


def check_url(key: str, url: str, schemes: tuple[str, ...]) -> None:
    """Raises ConfigError for an address that no server of that kind can have."""
    if url.partition("://")[0] not in schemes:
        raise ConfigError(key, url, f"must begin with {' or '.join(f'{each}://' for each in schemes)}")


def _check_classes(config: Config) -> None:
    names = list(config.service_classes)
    if len(names) > MOST_CLASSES:
        raise ConfigError("service_classes", names, f"must be at most {MOST_CLASSES}")
    for name in names:
        if not is_valid_id(name) or name in ("default", "auto"):
            rule = "must match [a-z0-9-]{1,64}, and default is what [objectives] says"
            raise ConfigError(f"service_classes.{name}", name, rule)
    named = {f"service_classes.{name}": each for name, each in config.service_classes.items()}
    for key, each in {"objectives": config.objectives, **named}.items():
        for field in ("ttft_s", "tpot_s", "end_to_end_s"):
            value = getattr(each, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{key}.{field}", value, "must be finite and over 0")
        if not math.isfinite(each.head_start_s):
            raise ConfigError(f"{key}.head_start_s", each.head_start_s, "must be a finite number")


def _floats(config: Config) -> Iterator[tuple[str, str]]:
    """Section and field of every float, but for those of classes of service."""
    for section in config.__struct_fields__:
        values = getattr(config, section)
        for field in getattr(values, "__struct_fields__", ()):
            if isinstance(getattr(values, field), float):
                yield section, field


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise TypeError("must be the text of a path")


def _choices(key: str) -> tuple[str, ...]:
    """What a setting of few words may be."""
    section, _, field = key.partition(".")
    kind = get_type_hints(get_type_hints(Config)[section])[field]
    literals = [each for each in (kind, *get_args(kind)) if get_origin(each) is Literal]
    return tuple(f"{each!r}" for literal in literals for each in get_args(literal))


def _conversion_error(tree: Mapping[str, Any], text: str) -> ConfigError:
    """msgspec says ``Expected `int`, got `str` - at `$.instance.block_size` ``: find key and value in it."""
    rule, _, location = text.partition(" - at `$")
    key = location.rstrip("`").lstrip(".")
    if rule.startswith("Object contains unknown field"):
        field = rule.split("`")[1]
        key = f"{key}.{field}" if key else field
        rule = "is not a known key"
    if rule.startswith("Invalid enum value"):
        rule = f"must be one of {', '.join(_choices(key))}"
    if "[...]" in key:
        table = key.partition("[")[0]
        key = key.replace("[...]", f".{_broken_entry(tree, table)}")
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return ConfigError(key or "(file)", value, rule)


def _broken_entry(tree: Mapping[str, Any], table: str) -> str:
    """The name that msgspec leaves out where a table holds others by names: the first that it refuses."""
    for name, entry in tree[table].items():
        try:
            msgspec.convert({table: {name: entry}}, Config, dec_hook=_decode_path)
        except msgspec.ValidationError:
            return str(name)
    raise AssertionError(f"every entry of {table} is as it should be")
