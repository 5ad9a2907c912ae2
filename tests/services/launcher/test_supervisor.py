"""The supervisor's own judgement, without a process."""

import asyncio
from pathlib import Path

import pytest

from common.config import Config
from common.errors import LauncherError
from common.store import Store
from services.launcher import supervisor as supervising
from services.launcher.launch_plan import LaunchPlan
from services.launcher.state_directory import StateDirectory
from services.launcher.supervisor import Supervisor
from services.launcher.wishes import parse_wishes


def test_a_scaling_that_the_machine_has_no_memory_for_starts_nothing(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "available_memory_bytes", lambda: 20 << 30)

    async def scale() -> None:
        async with asyncio.TaskGroup() as tasks:
            store = Store(redis_url, namespace)
            state = StateDirectory(tmp_path)
            supervisor = Supervisor(state, LaunchPlan(), Config(), store, tasks, "", has_launched=True)
            with pytest.raises(LauncherError, match=r"decode \+64 would take 64\.0 GiB"):
                await supervisor.scale(parse_wishes(["decode=64"]))
            assert not supervisor.children
            await store.close()

    asyncio.run(scale())
