"""A local mesh of small services without a model, and what its processes do."""

import asyncio
import os
import select
import sys
from pathlib import Path

import msgspec

from common.config import Config, MeshConfig
from common.config_file import load_config
from common.messages import MemberRecord
from services.launcher import local
from services.launcher.control import MeshStatus
from services.launcher.launch_plan import LaunchPlan
from services.launcher.state_directory import ProcessIdentity, StateDirectory, is_alive
from services.launcher.wishes import parse_wishes
from services.members import members_of

COMMAND = (sys.executable, "-m", "tests.common.small_service")
WAIT_S = 60.0
DRAIN_S = 5.0
CONFIG = Config(mesh=MeshConfig(drain_timeout_s=DRAIN_S, lease_s=5.0, heartbeat_s=0.2))
ONE_EACH = {"gateway-0", "scheduler-0", "prefill-0", "decode-0", "nats", "redis"}


def plan(**fields: object) -> LaunchPlan:
    return msgspec.structs.replace(LaunchPlan(port=0, command=COMMAND), **fields)


def identities(directory: Path) -> dict[str, ProcessIdentity]:
    return {each.service_id: each for each in StateDirectory(directory).read_processes()}


def wait_gone(processes: list[ProcessIdentity]) -> None:
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if is_alive(process):
                ending = select.poll()
                ending.register(handle, select.POLLIN)
                assert ending.poll(1000 * WAIT_S), f"{process.service_id} still runs"
        finally:
            os.close(handle)


def members(directory: Path) -> list[MemberRecord]:
    return asyncio.run(members_of(load_config(directory / "mesh.toml", environment={}).mesh))


def scale(directory: Path, *wishes: str, is_forced: bool = False) -> MeshStatus:
    return asyncio.run(local.scale(directory, parse_wishes(wishes), is_forced=is_forced))


def ids(status: MeshStatus) -> set[str]:
    return {process.id for process in status.processes}


def until(condition: object) -> None:
    """Other processes cannot tell this one: it asks again, paced by a wait that is never met."""
    assert callable(condition)
    reader, writer = os.pipe()
    try:
        for _ in range(round(WAIT_S / 0.05)):
            if condition():
                return
            select.select([reader], [], [], 0.05)
    finally:
        os.close(reader)
        os.close(writer)
    raise AssertionError(f"waited {WAIT_S} s")
