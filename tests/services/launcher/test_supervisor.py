"""What the supervisor starts and ends, with processes that are no services."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.config import Config
from common.errors import LauncherError
from common.store import Store
from services.launcher import supervisor as supervisor_module
from services.launcher.children import Child
from services.launcher.launch_plan import LaunchPlan
from services.launcher.state_directory import StateDirectory
from services.launcher.supervisor import Supervisor
from services.launcher.wishes import parse_wishes
from tests.services.launcher.test_children import WAIT_S, wait_said

HANGS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started", flush=True)
time.sleep(600)
"""
DRAINS = """
import pathlib, signal, sys, time
def drain(*_):
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, drain)
print("started", flush=True)
while True:
    signal.pause()
"""


@asynccontextmanager
async def supervising(directory: Path, redis_url: str, namespace: str) -> AsyncIterator[Supervisor]:
    """A mesh that serves, as far as it knows."""
    (directory / "logs").mkdir()
    async with asyncio.TaskGroup() as tasks:
        store, state = Store(redis_url, namespace), StateDirectory(directory)
        supervisor = Supervisor(state, LaunchPlan(), Config(), store, tasks, "", has_launched=True)
        try:
            yield supervisor
        finally:
            supervisor.kill()
            await store.close()


def add(supervisor: Supervisor, service_id: str, script: str, *arguments: str) -> Child:
    command = (sys.executable, "-c", script, *arguments)
    child = Child(service_id, service_id[:-2], command, {}, supervisor.state.log_file(service_id))
    supervisor.keep(child)
    return child


async def wait_started(children: Iterable[Child]) -> None:
    for child in children:
        await wait_said(child, "started")


def test_a_scaling_that_the_machine_has_no_memory_for_starts_nothing(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "available_memory_bytes", lambda: 20 << 30)

    async def scale() -> None:
        async with supervising(tmp_path, redis_url, namespace) as supervisor:
            with pytest.raises(LauncherError, match=r"decode \+64 would take 64\.0 GiB"):
                await supervisor.scale(parse_wishes(["decode=64"]))
            assert not supervisor.children

    asyncio.run(scale())


def test_so_many_start_at_a_time_as_the_machine_has_cores_and_the_next_when_one_is_ready(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """62 at once left nothing for those that served."""
    monkeypatch.setattr(supervisor_module, "starts_at_a_time", lambda: 2)

    async def start() -> None:
        async with supervising(tmp_path, redis_url, namespace) as supervisor:
            children = [add(supervisor, f"decode-{number}", HANGS) for number in range(4)]
            await wait_started(children[:2])
            assert [child.turn.is_set() for child in children] == [True, True, False, False]
            children[1].settled.set()
            await wait_started(children[:3])
            assert children[3].pid is None
            children[0].kill()
            await wait_started(children[3:])

    asyncio.run(start())


def test_who_was_never_ready_ends_before_anybody_waits_for_what_is_drained(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lamella down` waited for the gateway, while 62 instances that were starting kept it from ending."""
    monkeypatch.setattr(supervisor_module, "starts_at_a_time", lambda: 2)
    may_end = tmp_path / "may-end"

    async def stop() -> None:
        async with supervising(tmp_path, redis_url, namespace) as supervisor:
            gateway = add(supervisor, "gateway-0", DRAINS, str(may_end))
            await wait_started([gateway])
            gateway.settled.set()
            starting = [add(supervisor, f"decode-{number}", HANGS) for number in range(3)]
            await wait_started(starting[:2])
            stopping = asyncio.create_task(supervisor.stop(WAIT_S))
            for child in starting:
                await child.ended.wait()
            assert not starting[2].log_file.exists(), "it never began"
            assert not gateway.ended.is_set()
            may_end.touch()
            await stopping
            assert gateway.ended.is_set()

    asyncio.run(stop())


def test_who_dies_while_the_mesh_ends_is_not_started_again(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    may_end = tmp_path / "may-end"

    async def stop() -> None:
        async with supervising(tmp_path, redis_url, namespace) as supervisor:
            gateway = add(supervisor, "gateway-0", DRAINS, str(may_end))
            decode = add(supervisor, "decode-0", HANGS)
            await wait_started([gateway, decode])
            gateway.settled.set()
            decode.settled.set()
            stopping = asyncio.create_task(supervisor.stop(WAIT_S))
            await asyncio.sleep(0)
            assert decode.pid is not None
            os.kill(decode.pid, signal.SIGKILL)
            await decode.ended.wait()
            assert decode.restarts == 0
            may_end.touch()
            await stopping

    asyncio.run(stop())
