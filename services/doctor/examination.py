"""What is examined, in which order, for a mesh that would run here or does."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.config_file import load_config, load_named_servers
from services.doctor.child import ask_child
from services.doctor.collector import examine_collector
from services.doctor.findings import Finding
from services.doctor.hardware import examine_gpu, examine_rdma
from services.doctor.machine import (
    examine_clock,
    examine_memory,
    examine_open_files,
    examine_shared_memory,
)
from services.doctor.servers import (
    examine_embedded,
    examine_gateway_port,
    examine_nats,
    examine_redis,
    examine_transfer_ports,
)
from services.doctor.software import (
    examine_libibverbs,
    examine_packages,
    examine_python,
    judge_mooncake,
)
from services.launcher import embedded
from services.launcher.state_directory import StateDirectory, is_locked


@dataclass(frozen=True, slots=True)
class Plan:
    """What would run here. A URL is None where the mesh brings a server of its own; ``port`` None: the mesh
    runs already."""

    config: Config
    nats_url: str | None
    redis_url: str | None
    port: int | None


def planned(
    config_file: Path | None, state_dir: Path, nats: str | None, redis: str | None, port: int
) -> Plan:
    """Servers are those named by option, environment or settings, or those of the mesh that runs. Raises
    ConfigError."""
    state = StateDirectory(state_dir.expanduser().absolute())
    is_running = config_file is None and is_locked(state)
    config = load_config(state.config_file if is_running else config_file)
    named = load_named_servers(state.config_file if is_running else config_file)
    nats_url, redis_url = nats or named.nats_url, redis or named.redis_url
    return Plan(config, nats_url, redis_url, None if is_running else port)


def examine(plan: Plan) -> Iterator[Finding]:
    """Quick looks first, so that a terminal has something to show."""
    config = plan.config
    yield examine_python()
    yield examine_packages()
    yield examine_memory(config)
    yield examine_shared_memory(config)
    yield examine_open_files(config)
    yield examine_clock()
    if plan.port is not None:
        yield examine_gateway_port(config.service.host, plan.port)
    yield examine_transfer_ports(config.transfer)
    yield examine_libibverbs()
    yield judge_mooncake(ask_child("mooncake"), config.transfer)
    yield examine_rdma(config)
    yield examine_gpu(config)
    if plan.nats_url is None:
        yield examine_embedded("NATS", embedded.prepare_nats, "--nats")
    else:
        yield asyncio.run(examine_nats(plan.nats_url, config.mesh.namespace))
    if plan.redis_url is None:
        yield examine_embedded("Redis", embedded.prepare_redis, "--redis")
    else:
        yield asyncio.run(examine_redis(plan.redis_url, config.mesh.namespace))
    if config.telemetry.otlp_endpoint is not None:
        yield examine_collector(config.telemetry.otlp_endpoint)
