"""What settings have to fulfil beyond their types: ``common.config_file`` refuses what breaks a rule, and
docs/configuration.md says all of them."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from common.config import Config, ObjectivesConfig
from common.ids import is_valid_id
from common.scaling import ScaledService

OVER_ZERO = (
    "instance.mixed_max_wait_s",
    "predictor.timeout_s",
    "scheduler.max_prefill_wait_s",
    "scaling.window_s",
    "roles.look_s",
    "roles.overflow_queue_s",
    "roles.idle_s",
    "mesh.heartbeat_s",
    "mesh.call_timeout_s",
    "mesh.drain_timeout_s",
    "instance.report_interval_s",
    "instance.report_gap_s",
    "transfer.deadline_s",
    "transfer.suspect_after_s",
    "transfer.emulated_bandwidth_bytes_per_s",
    "gateway.slow_reader_timeout_s",
    "gateway.token_timeout_s",
    "gateway.bus_timeout_s",
    "gateway.keep_alive_comment_s",
    "gateway.header_timeout_s",
    "gateway.body_timeout_s",
)
SCALED_SERVICES: tuple[str, ...] = get_args(ScaledService)
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
    "instance.max_step_context_tokens",
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
    "gateway.wait_for_instance_s",
    "scaling.up_cooldown_s",
    "roles.cool_down_s",
    "roles.settle_s",
    "roles.repurpose_s",
    "roles.replace_after_s",
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
OTLP_SCHEMES = ("http", "https")
DEVICE = re.compile("cpu|cuda(:[0-9]{1,2})?")

MOST_THREADS = 1024
"""More than a machine has cores; the library that runs them dies of tens of thousands."""
MOST_CLASSES = 16
"""Each has series of its own in every metric of latency."""
MOST_BATCHES = 16
"""Each has a lane at every attention worker, and most have a replica's thread."""

ID = "must match [a-z0-9-]{1,64}"
FINITE = "must be a finite number"
Bound = tuple[tuple[str, ...], str, Callable[[Any], bool]]
BOUNDS: tuple[Bound, ...] = (
    (("mesh.namespace", "service.service_id"), ID, is_valid_id),
    (("service.port", "gateway.private_port"), "must be 0..65535", lambda value: 0 <= value <= 65_535),
    (OVER_ZERO, "must be over 0", lambda value: value > 0),
    (NOT_NEGATIVE, "must be 0 or more", lambda value: value >= 0),
    (AT_LEAST_ONE, "must be at least 1", lambda value: value >= 1),
    (("model.threads",), f"must be at most {MOST_THREADS}", lambda value: value <= MOST_THREADS),
    (("transfer.min_port", "transfer.max_port"), "must be 1..65535", lambda value: 1 <= value <= 65_535),
    (("scheduler.shadow_share",), "must be 0..0.1", lambda value: 0 <= value <= 0.1),
    (SHARES, "must be over 0 and at most 1", lambda value: 0 < value <= 1),
    (("scaling.utilisation",), "must be over 0 and under 1", lambda value: 0 < value < 1),
    (HOSTS, "must name a host: an empty one is every address of this machine", bool),
    (("attention.device",), "must be cpu, cuda or cuda:N", lambda value: bool(DEVICE.fullmatch(value))),
)
"""Rules of one value each, for several keys; a setting that is not set fulfils them all."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``text`` is the same whatever else is set; ``given`` says what it comes to with the other settings."""

    key: str
    value: Any
    text: str
    is_met: bool
    given: str = ""


def rules_of(config: Config) -> Iterator[Rule]:
    """Every rule, in the order in which they are told; what breaks one may not suit those after it."""
    for key in _floats(config):
        yield _rule(config, key, FINITE, math.isfinite)
    for keys, text, holds in BOUNDS:
        for key in keys:
            yield _rule(config, key, text, holds)
    for key, schemes in (
        ("mesh.nats_url", NATS_SCHEMES),
        ("mesh.redis_url", REDIS_SCHEMES),
        ("telemetry.otlp_endpoint", OTLP_SCHEMES),
    ):
        rule = _rule(config, key, scheme_rule(schemes), partial(has_scheme, schemes=schemes))
        yield rule if rule.value is None else replace(rule, value=without_credentials(rule.value))
    yield from _pairs(config)
    yield from _replica_rules(config)
    yield from _class_rules(config)


def has_scheme(url: str, schemes: tuple[str, ...]) -> bool:
    return url.partition("://")[0] in schemes


def without_credentials(url: str) -> str:
    """To be told: who logs in, and by which password, stands before the host."""
    login, at, place = url.rpartition("@")
    return f"{login.partition('://')[0]}://...@{place}" if at else url


def scheme_rule(schemes: tuple[str, ...]) -> str:
    return f"must begin with {' or '.join(f'{each}://' for each in schemes)}"


def _pairs(config: Config) -> Iterator[Rule]:
    """Of settings that depend on another one."""
    mesh, scaling, transfer = config.mesh, config.scaling, config.transfer
    private_port, public_port = config.gateway.private_port, config.service.port
    yield Rule(
        "gateway.private_port",
        private_port,
        "must not be service.port, but for 0: what is private is not for clients",
        private_port == 0 or private_port != public_port,
    )
    # A flip would be mended by an instance that starts, and one that drains.
    yield Rule(
        "scaling.policy",
        scaling.policy,
        "on needs roles.policy = 'fixed', as both change counts",
        scaling.policy != "on" or config.roles.policy == "fixed",
        f": it is {config.roles.policy!r}",
    )
    for service in SCALED_SERVICES:
        least: int = getattr(scaling, f"min_{service}")
        most: int = getattr(scaling, f"max_{service}")
        text = f"must be at least scaling.min_{service}"
        yield Rule(f"scaling.max_{service}", most, text, most >= least, f" = {least}")
    text, least_s = "must be at least 2 x mesh.heartbeat_s", 2 * mesh.heartbeat_s
    yield Rule("mesh.lease_s", mesh.lease_s, text, mesh.lease_s >= least_s, f" = {least_s}")
    text, above = "must be over transfer.min_port", transfer.min_port
    yield Rule("transfer.max_port", transfer.max_port, text, transfer.max_port > above, f" = {above}")
    yield Rule(
        "transfer.path",
        transfer.path,
        "shared_memory needs transfer.protocol = 'tcp'",
        transfer.path != "shared_memory" or transfer.protocol == "tcp",
        f": it is {transfer.protocol!r}",
    )
    yield Rule(
        "attention.device",
        config.attention.device,
        "must be cpu with transfer.path = 'shared_memory': nobody can map a device's memory",
        config.attention.device == "cpu" or transfer.path != "shared_memory",
    )
    predictor = config.predictor
    for kind, key, source in (
        ("classifier", "predictor.directory", predictor.directory),
        ("oracle", "predictor.lengths_file", predictor.lengths_file),
    ):
        is_met = predictor.kind != kind or source is not None
        yield Rule(key, source, f"must be set with predictor.kind = {kind!r}", is_met)


def _replica_rules(config: Config) -> Iterator[Rule]:
    batches, devices = config.instance.staggered_batches, config.instance.replica_devices
    turns = "n batches take turns, fixed on n model replicas or rotating over n - 1"
    text = f"must be 2..{MOST_BATCHES}: {turns}"
    yield Rule("instance.staggered_batches", batches, text, 2 <= batches <= MOST_BATCHES)
    is_fixed = config.instance.pipeline == "fixed"
    replicas, first = batches - (not is_fixed), config.model.device
    yield Rule(
        "instance.replica_devices",
        devices,
        "must be none, or a device for each model replica (with pipeline = 'fixed' as many as"
        " instance.staggered_batches, else one less), the first of them model.device",
        not devices or (len(devices) == replicas and devices[0] == first),
        f": {replicas}, beginning with {first!r}",
    )


def _class_rules(config: Config) -> Iterator[Rule]:
    classes = config.service_classes
    text = f"must be at most {MOST_CLASSES}"
    yield Rule("service_classes", list(classes), text, len(classes) <= MOST_CLASSES)
    for name in classes:
        is_name = is_valid_id(name) and name not in ("default", "auto")
        yield Rule(f"service_classes.{name}", name, f"{ID}, and default is what [objectives] says", is_name)
    yield from _objective_rules("objectives", config.objectives)
    for name, each in classes.items():
        yield from _objective_rules(f"service_classes.{name}", each)


def _objective_rules(section: str, objectives: ObjectivesConfig) -> Iterator[Rule]:
    for field in ("ttft_s", "tpot_s", "end_to_end_s"):
        value = getattr(objectives, field)
        is_met = value is None or (math.isfinite(value) and value > 0)
        yield Rule(f"{section}.{field}", value, "must be finite and over 0", is_met)
    head_start_s = objectives.head_start_s
    yield Rule(f"{section}.head_start_s", head_start_s, FINITE, math.isfinite(head_start_s))


def _rule(config: Config, key: str, text: str, holds: Callable[[Any], bool]) -> Rule:
    section, field = key.split(".")
    value = getattr(getattr(config, section), field)
    return Rule(key, value, text, value is None or holds(value))


def _floats(config: Config) -> Iterator[str]:
    """Every float, but for those of classes of service."""
    for section in config.__struct_fields__:
        values = getattr(config, section)
        if isinstance(values, ObjectivesConfig):
            continue
        for field in getattr(values, "__struct_fields__", ()):
            if isinstance(getattr(values, field), float):
                yield f"{section}.{field}"
