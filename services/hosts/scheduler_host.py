"""`lamella serve scheduler`."""

import asyncio

from common.config import Config
from common.service import Running, ServiceProcess, run_service
from scheduler.explanations import add_routes, export_regret
from scheduler.leadership import Leadership
from scheduler.metrics import LeaderMetrics, ScalingMetrics, SchedulerMetrics
from scheduler.planning import Planner
from scheduler.role_changes import RoleChanges
from scheduler.scaling import Scaling
from scheduler.service import SchedulerService
from scheduler.state import SchedulerState
from scheduler.waiting_room import WaitingRoom


async def run_scheduler(config: Config) -> None:
    """Runs one scheduler until it is told to stop."""
    await run_service(config, "scheduler", _start)


async def _start(process: ServiceProcess) -> Running:
    config = process.config
    leadership = Leadership(
        process.store,
        process.bus,
        process.subjects,
        process.service_id,
        process.incarnation,
        config.mesh,
        LeaderMetrics(process.registry),
    )
    scheduler = SchedulerService(
        scheduler_id=process.service_id,
        state=SchedulerState(
            lease_s=config.mesh.lease_s,
            settings=config.scheduler,
            objectives=config.objectives,
            service_classes=config.service_classes,
            incarnation=process.incarnation,
            waiting=_waiting_room(config),
        ),
        bus=process.bus,
        store=process.store,
        subjects=process.subjects,
        metrics=SchedulerMetrics(process.registry),
        config=config,
        is_read_due=asyncio.Event(),
        spawn=process.spawn,
        leading_epoch=lambda: leadership.epoch,
    )
    add_routes(process.app, scheduler.state.placer)
    export_regret(process.registry, scheduler.state.placer.regret)
    await leadership.start()
    await scheduler.start()
    process.spawn(scheduler.watch())
    process.spawn(scheduler.mirror.keep())
    process.spawn(leadership.keep())
    if config.scaling.policy != "off":
        scheduler.scaling = _scaling(process, scheduler.state, leadership)
        scheduler.scaling.add_routes(process.app)
        process.spawn(scheduler.scaling.run())

    if config.roles.policy != "fixed":
        roles = RoleChanges(
            config.roles,
            scheduler.state,
            process.bus,
            process.subjects,
            config.mesh,
            lambda: leadership.epoch,
        )
        roles.add_routes(process.app)
        process.spawn(roles.run())

    async def drain(timeout_s: float) -> None:
        """Who waits is told to ask another one; other calls at hand are answered when the bus closes."""
        scheduler.turns.leave()
        scheduler.sharing.leave()
        await scheduler.mirror.write()
        await leadership.resign()

    async def close() -> None:
        """Holds nothing but its wires, which the process closes."""

    return Running(process.record("scheduler"), drain, close)


def _waiting_room(config: Config) -> WaitingRoom:
    """In the order in which an instance would compute the prompts."""
    instance = config.instance
    return WaitingRoom(
        config.scheduler.max_deferred_requests,
        instance.prefill_order,
        instance.scheduling_window,
        instance.prefill_aging_tokens_per_s,
    )


def _scaling(process: ServiceProcess, state: SchedulerState, leadership: Leadership) -> Scaling:
    return Scaling(
        planner=Planner(process.config, asyncio.get_running_loop().time()),
        state=state,
        bus=process.bus,
        store=process.store,
        subjects=process.subjects,
        metrics=ScalingMetrics(process.registry),
        config=process.config,
        leading_epoch=lambda: leadership.epoch,
    )
