"""The smallest service there is, for tests of what every service process does.

Configuration is the environment's. A question on the bus is answered when somebody wakes it up; the service
drains while one is open.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from common.config_file import load_config
from common.errors import EngineError
from common.ids import InstanceId
from common.messages import InstanceRecord, MemberRecord, ServiceRecord
from common.service import Running, ServiceProcess, run_process, run_service
from scheduler.metrics import SchedulerMetrics


class Sleepy(msgspec.Struct, frozen=True, tag="sleepy"):
    """A call, answered after a Wake."""


class Woken(msgspec.Struct, frozen=True, tag="woken"):
    """Its answer."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Published: every open call is answered."""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """Published: a task of the service fails."""


async def start(process: ServiceProcess) -> Running:
    idle, awake, broken = asyncio.Event(), asyncio.Event(), asyncio.Event()
    idle.set()

    async def answer(question: Sleepy) -> Woken:
        idle.clear()
        await awake.wait()
        idle.set()
        return Woken()

    async def drain(timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await idle.wait()

    async def close() -> None:
        sys.stderr.write("closed\n")

    async def fail() -> None:
        await broken.wait()
        raise EngineError("the thread died")

    @process.app.post("/v1/completions")
    async def complete() -> dict[str, str]:
        """Stands for a mesh that serves, in the launcher's tests."""
        return {"object": "text_completion"}

    namespace = process.config.mesh.namespace
    process.spawn(fail())
    await process.bus.subscribe(f"{namespace}.wake", Wake, lambda _: awake.set())
    await process.bus.subscribe(f"{namespace}.fail", Fail, lambda _: broken.set())
    await process.bus.serve(f"{namespace}.sleep", Sleepy, answer)
    if process.kind == "scheduler":
        process.spawn(_count_instances(process))
    return Running(_record(process), drain, close)


async def _count_instances(process: ServiceProcess) -> None:
    """As the real scheduler: reads the members every heartbeat and says how many instances it knows."""
    metrics = SchedulerMetrics(process.registry)
    while True:
        members = await process.store.members()
        metrics.observe_mesh(sum(isinstance(member, InstanceRecord) for member in members), 0, 0)
        await asyncio.sleep(process.config.mesh.heartbeat_s)


def _record(process: ServiceProcess) -> MemberRecord:
    if process.kind == "prefill" or process.kind == "decode":
        return InstanceRecord(
            instance_id=InstanceId(process.service_id),
            incarnation=process.incarnation,
            role="prefill" if process.kind == "prefill" else "decode",
            model="none",
            host="127.0.0.1",
            pid=os.getpid(),
            http_url=process.http_url,
            block_size=1,
            total_blocks=1,
            largest_pool_blocks=1,
            context_length=1,
            dtype="fp32",
        )
    return ServiceRecord(
        service_id=process.service_id,
        incarnation=process.incarnation,
        kind="scheduler" if process.kind == "scheduler" else "gateway",
        host="127.0.0.1",
        pid=os.getpid(),
        http_url=process.http_url,
    )


def main() -> int:
    """``small_service [ROLE --config FILE]``, as ``lamella serve`` takes them."""
    role, config_file = (sys.argv[1], Path(sys.argv[3])) if len(sys.argv) > 1 else ("gateway", None)
    if role == os.environ.get("BROKEN_ROLE"):
        sys.stderr.write("this role is broken\n")
        return 3
    return run_process(run_service(load_config(config_file), role, start))


if __name__ == "__main__":
    sys.exit(main())
