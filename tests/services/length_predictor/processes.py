"""A scheduler and a length predictor as processes of their own, and two instances that only answer."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.bus import Bus
from common.config import Config, ServiceConfig
from common.config_file import to_toml
from common.ids import InstanceId
from common.messages import (
    Acknowledged,
    InstanceEvent,
    LengthPredicted,
    Placement,
    PrefillTask,
    RequestEnded,
    SubmitRequest,
)
from common.store import Store
from common.subjects import Subjects
from services.launcher.launch_plan import child_environment
from tests.common.buses import connected, until
from tests.gateway.processes import POLL_S, START_TIMEOUT_S, GatewayProcess, _wait_event
from tests.requests import make_request
from tests.scheduler.states import gateway_record, record_of, report_of

CALL_TIMEOUT_S = 10.0
PREFILL, DECODE = "p0", "d0"


@contextmanager
def running_service(role: str, config: Config, directory: Path) -> Iterator[GatewayProcess]:
    """Ready when this returns, and gone at the end."""
    settings = msgspec.structs.replace(config, service=ServiceConfig(service_id=f"{role}-0"))
    config_file, log_file = directory / f"{role}.toml", directory / f"{role}.log"
    config_file.write_text(to_toml(settings))
    with log_file.open("wb") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", role, "--config", str(config_file)],
            env=child_environment(settings, f"{role}-0", 0),
            stderr=log,
        )
    try:
        yield GatewayProcess(settings, _wait_event(popen, log_file, "service_ready"), popen)
    finally:
        popen.terminate()
        try:
            popen.wait(START_TIMEOUT_S)
        finally:
            popen.kill()
    assert "Traceback" not in log_file.read_text()


@dataclass(slots=True)
class Mesh:
    """The test's side. ``tasks`` are what the prefill instance was given, ``told`` what the decode instance
    was told of lengths."""

    bus: Bus
    subjects: Subjects
    tasks: list[PrefillTask] = field(default_factory=list)
    told: list[LengthPredicted] = field(default_factory=list)

    async def submit(self, request_id: str, prompt_tokens: int = 4) -> Placement:
        message = SubmitRequest(make_request(request_id, prompt_tokens, max_tokens=900))
        return await self.bus.call(self.subjects.submit(), message, Placement, CALL_TIMEOUT_S)

    def end(self, request_id: str, output_tokens: int | None, prompt_tokens: int = 4) -> None:
        ended = RequestEnded(make_request(request_id).request_id, prompt_tokens, output_tokens)
        self.bus.publish(self.subjects.scheduler_events(), ended)

    async def wait_told(self, count: int) -> None:
        await until(lambda: len(self.told) >= count, self.bus)

    async def take_task(self, task: PrefillTask) -> Acknowledged:
        self.tasks.append(task)
        return Acknowledged()

    def take_event(self, message: InstanceEvent) -> None:
        if isinstance(message, LengthPredicted):
            self.told.append(message)


@asynccontextmanager
async def joined_mesh(config: Config) -> AsyncIterator[Mesh]:
    """A prefill and a decode instance that live, known to the scheduler."""
    settings, subjects = config.mesh, Subjects(config.mesh.namespace)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connected(settings.nats_url, settings.namespace))
        mesh = Mesh(bus, subjects)
        await bus.serve(subjects.instance_calls(InstanceId(PREFILL)), PrefillTask, mesh.take_task)
        await bus.subscribe(subjects.instance_events(InstanceId(DECODE)), InstanceEvent, mesh.take_event)
        for record in (record_of(PREFILL, "prefill"), record_of(DECODE, "decode"), gateway_record()):
            store = Store(settings.redis_url, settings.namespace)
            stack.push_async_callback(store.close)
            await store.join(record, settings.lease_s)
        reporting = asyncio.create_task(_report(mesh))
        stack.callback(reporting.cancel)
        yield mesh


async def _report(mesh: Mesh) -> None:
    for sequence in range(1, round(START_TIMEOUT_S / POLL_S)):
        for report in (report_of(PREFILL, "prefill", sequence), report_of(DECODE, "decode", sequence)):
            mesh.bus.publish(mesh.subjects.scheduler_events(), report)
        await asyncio.sleep(POLL_S)
