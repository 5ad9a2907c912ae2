"""`lamella serve scheduler`."""

import asyncio

from common.config import Config
from common.service import Running, ServiceProcess, run_service
from common.telemetry import SchedulerMetrics
from scheduler.service import SchedulerService
from scheduler.state import SchedulerState


async def run_scheduler(config: Config) -> None:
    """Runs one scheduler until it is told to stop."""
    await run_service(config, "scheduler", _start)


async def _start(process: ServiceProcess) -> Running:
    config = process.config
    scheduler = SchedulerService(
        state=SchedulerState(
            lease_s=config.mesh.lease_s,
            max_pending_prefill_tokens=config.scheduler.max_pending_prefill_tokens,
            max_requests_per_decode=config.scheduler.max_requests_per_decode,
        ),
        bus=process.bus,
        store=process.store,
        subjects=process.subjects,
        metrics=SchedulerMetrics(process.registry),
        config=config,
        is_read_due=asyncio.Event(),
    )
    await scheduler.start()
    process.spawn(scheduler.watch())

    async def drain(timeout_s: float) -> None:
        """Nothing waits in a scheduler: calls at hand are answered when the bus closes."""

    async def close() -> None:
        """Holds nothing but its wires, which the process closes."""

    return Running(process.record("scheduler"), drain, close)
