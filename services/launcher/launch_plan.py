"""What a local mesh is made of: the plan the command line makes and the supervisor carries out."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from common.config import Config, InstanceConfig
from common.config_file import ENVIRONMENT
from common.errors import ConfigError
from common.messages import Role
from common.scaling import ScaledRole
from common.secret_files import FILE_VARIABLES

MAX_INSTANCES = 64
"""Of one role on one machine; a typing error should not start a thousand processes."""
STOP_GRACE_S = 10.0
"""Beyond the drain, before a service is killed."""
MAX_PORT = 65_535
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
SCALED_ROLES: tuple[ScaledRole, ...] = get_args(ScaledRole)
INDISPENSABLE: Mapping[ScaledRole, str] = {"gateway": "takes requests", "scheduler": "places requests"}

ALLOCATOR_ENVIRONMENT = {
    # glibc gives freed memory back to the kernel and faults it in again at the next step; keeping it took the
    # linears of a 1,024-token prefill from 190 to 130 ms (docs/benchmarks.md).
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    # It asks the kernel for huge pages: a step reads all weights, and a processor knows few small pages
    # (docs/benchmarks.md).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # It gets none for what a thread's own arena holds, which grows by small steps: models are computed on a
    # thread, whose steps took 4 to 7 % longer (measured with one; docs/benchmarks.md).
    "MALLOC_ARENA_MAX": "1",
    # A core that waits in a spin loop is a core that another instance of the same machine does not get.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
}


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``attention`` workers, if any, serve every decode instance. ``port`` is the gateway's. Of several
    ``schedulers`` one leads.

    ``nats_url`` and ``redis_url`` None start embedded servers.

    ``command`` runs one service when a role and ``--config FILE`` are appended.
    """

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    attention: int = 0
    schedulers: int = 1
    port: int = 8000
    nats_url: str | None = None
    redis_url: str | None = None
    command: tuple[str, ...] = (sys.executable, "-m", "services.cli", "serve")


def parse_counts(counts: Sequence[str], option: str = "scale") -> dict[ScaledRole, int]:
    """Of ``role=N``. Raises ConfigError."""
    wanted: dict[ScaledRole, int] = {}
    for item in counts:
        role, _, number = item.partition("=")
        if role not in SCALED_ROLES or not (number.isascii() and number.isdecimal()):
            raise ConfigError(option, item, f"must be ROLE=N, of {', '.join(SCALED_ROLES)}")
        if role in wanted:
            raise ConfigError(option, item, f"{role} is said twice")
        wanted[role] = int(number)
    return wanted


def check_counts(counts: Mapping[ScaledRole, int], most: int = MAX_INSTANCES) -> None:
    """Raises ConfigError for a count that cannot be run."""
    for role, count in counts.items():
        if not 0 <= count <= most:
            raise ConfigError(role, count, f"must be 0..{most} instances")
        if role in INDISPENSABLE and count == 0:
            raise ConfigError(role, count, f"must be at least 1: nobody else {INDISPENSABLE[role]}")


def counts_of(plan: LaunchPlan) -> dict[ScaledRole, int]:
    """Of those that a plan can have several of."""
    return {
        "prefill": plan.prefill,
        "decode": plan.decode,
        "mixed": plan.mixed,
        "attention": plan.attention,
        "scheduler": plan.schedulers,
    }


def check_plan(plan: LaunchPlan, config: Config) -> None:
    """Raises ConfigError for a plan that cannot be run."""
    check_counts(counts_of(plan))
    pipeline = config.instance.pipeline
    if pipeline != "off" and not plan.attention:
        raise ConfigError("instance.pipeline", pipeline, "needs attention workers: --attention N")
    roles = config.roles.policy
    if roles != "fixed" and plan.attention:
        raise ConfigError("roles.policy", roles, "needs instances that hold their KV: without --attention")
    partition = config.instance.attention_partition
    if partition != InstanceConfig().attention_partition and not plan.attention:
        raise ConfigError("instance.attention_partition", partition, "needs attention workers: --attention N")
    batches = config.instance.staggered_batches
    if pipeline == "off" and batches > 2:
        raise ConfigError("instance.staggered_batches", batches, "needs --pipeline fixed or rotational")


def configured(config: Config, plan: LaunchPlan) -> Config:
    """The settings of the mesh's services, as far as the plan decides them. The private port is the next one
    after the gateway's, if nobody says another."""
    replace = msgspec.structs.replace
    if plan.port and not config.gateway.private_port:
        private_port = (plan.port + 1) % (MAX_PORT + 1)
        config = replace(config, gateway=replace(config.gateway, private_port=private_port))
    if not plan.attention:
        return config
    # Their memory is shared out at the start, also to instances that may be added.
    most = config.scaling.max_decode if config.scaling.policy == "on" else 1
    return replace(
        config,
        instance=replace(config.instance, attention_workers=plan.attention),
        attention=replace(config.attention, decode_instances=max(most, plan.decode)),
    )


def child_environment(config: Config, service_id: str, port: int) -> dict[str, str]:
    """The environment of one service: everything configured is in its file, except its own name and port."""
    root = str(Path(__file__).resolve().parents[2])
    configured = {*ENVIRONMENT, *FILE_VARIABLES}
    inherited = {key: value for key, value in os.environ.items() if key not in configured}
    return {
        **ALLOCATOR_ENVIRONMENT,
        **inherited,
        "LAMELLA_SERVICE_ID": service_id,
        "LAMELLA_PORT": str(port),
        # The source tree works without being installed, from any directory.
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }
