"""What every service process does the same, from its first socket to its last message.

Order of start: HTTP listens (alive, not ready) → bus → the service's own part (``Start``) → the record in
the store → ready. Order of stop, at SIGTERM or SIGINT: not ready → drain, bounded → leave the store → close
bus and HTTP. A second signal, or a bus that is gone, cuts the drain short.

One TaskGroup owns every task: a task that fails ends the process, which is what its supervisor can handle.
Losing the store stops nothing; losing the bus for good or the machine's address, or a newer incarnation of
oneself, ends the process.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from common.bus import CLOSE_TIMEOUT_S, Bus
from common.cancellation import cancel_and_wait
from common.config import Config
from common.errors import BusError, LamellaError, StoreError, StoreUnavailable
from common.http import Health, HttpServer, service_app
from common.ids import Incarnation, new_incarnation
from common.listening import bind, port_of, url_of
from common.logs import configure_logging
from common.messages import MemberRecord, ServiceKind, ServiceRecord
from common.own_address import watch_own_addresses
from common.signals import listen_to_signals
from common.spans import spans
from common.store import Store
from common.subjects import Subjects
from common.telemetry import WireCounters, export_count, new_registry, sample_loop_lag
from common.tracing import Tracing
from common.vllm_metrics import VllmNames

log = logging.getLogger("lamella.service")

Result = TypeVar("Result")

DRAIN_GRACE_S = 5.0
"""Beyond ``mesh.drain_timeout_s``, for a drain that has expired to end what is left."""
ABORT_CLOSE_S = 0.5
"""How long handlers may still run when a second signal came."""


@dataclass(frozen=True, slots=True)
class Running:
    """A started service. ``drain(timeout_s)`` returns when nothing is left; ``close`` frees what it holds.
    ``describe``: its record as it is now, where that changes; each heartbeat writes it."""

    record: MemberRecord
    drain: Callable[[float], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    describe: Callable[[], MemberRecord] | None = None


@dataclass(slots=True)
class ServiceProcess:
    """What a service is given: its names, its wires, its HTTP app and its tasks.

    ``app`` takes further routes and mounts, ``health`` further checks, ``registry`` further metrics.
    """

    config: Config
    kind: str
    service_id: str
    incarnation: Incarnation
    http_url: str
    bus: Bus
    store: Store
    subjects: Subjects
    registry: CollectorRegistry
    health: Health
    app: FastAPI
    is_started: bool = False
    has_joined: bool = False
    is_draining: bool = False
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _alive: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` until it ends or the process stops; a failure of it ends the process."""
        task = self._tasks.create_task(work)
        self._alive.add(task)
        task.add_done_callback(self._alive.discard)

    def record(self, kind: ServiceKind) -> ServiceRecord:
        """What a service without weights of its own writes into the store."""
        return ServiceRecord(
            service_id=self.service_id,
            incarnation=self.incarnation,
            kind=kind,
            host=self.config.service.advertise_host,
            pid=os.getpid(),
            http_url=self.http_url,
        )

    def _cancel_tasks(self) -> None:
        for task in self._alive:
            task.cancel()


Start = Callable[[ServiceProcess], Awaitable[Running]]
"""Builds a service over its wires and subscribes; the process registers it afterwards."""


def run_process(service: Coroutine[Any, Any, None]) -> int:
    """Runs a service to its end on uvloop; the exit status. Failures are logged."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(service)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        for leaf in _leaves(error):
            # A LamellaError says all there is to say; anything else is a defect and needs its place.
            trace = None if isinstance(leaf, LamellaError) else leaf
            log.error("service_failed", extra={"error": f"{type(leaf).__name__}: {leaf}"}, exc_info=trace)
        return 1
    return 0


async def run_service(
    config: Config,
    kind: str,
    start: Start,
    protocol: type[asyncio.Protocol] | None = None,
    starting: ASGIApp | None = None,
    guard: Callable[[ASGIApp], ASGIApp] | None = None,
) -> None:
    """Runs one service until SIGTERM or SIGINT. ``protocol`` replaces uvicorn's httptools protocol;
    ``starting`` answers the paths that ``start`` has not added yet; ``guard`` is put before all of them.

    Raises ConfigError, BusUnavailable and whatever ``start`` raises, alone or in an ExceptionGroup.
    """
    service_id = config.service.service_id or f"{kind}-{secrets.token_hex(3)}"
    configure_logging(service_id)
    listener = bind(config.service.host, config.service.port)
    spans.start(config.telemetry, kind, service_id)
    process = _new_process(config, kind, service_id, port_of(listener))
    if starting is not None:
        process.app.router.default = starting
    stop, abort = listen_to_signals()
    server = HttpServer(process.app if guard is None else guard(process.app), protocol)
    async with process._tasks as tasks:
        http_task = tasks.create_task(server.serve([listener]))
        process.spawn(sample_loop_lag(process.registry))
        try:
            await server.is_listening.wait()
            log.info("service_listening", extra={"url": process.http_url})
            running = await _unless(stop, _bring_up(process, start))
            if running is not None:
                await _live(process, running, stop, abort)
        finally:
            process._cancel_tasks()
            await process.bus.close(ABORT_CLOSE_S if abort.is_set() else CLOSE_TIMEOUT_S)
            await process.store.close()
            server.stop()
            await asyncio.to_thread(spans.stop)
        await http_task
    log.info("service_stopped")


def _new_process(config: Config, kind: str, service_id: str, port: int) -> ServiceProcess:
    mesh = config.mesh
    subjects = Subjects(mesh.namespace)
    registry, health = new_registry(kind), Health()
    exported = VllmNames(registry) if config.service.vllm_metrics else registry
    process = ServiceProcess(
        config=config,
        kind=kind,
        service_id=service_id,
        incarnation=new_incarnation(),
        http_url=url_of(config.service.advertise_host, port),
        bus=Bus(mesh.nats_url, name=service_id, subjects=subjects),
        store=Store(mesh.redis_url, mesh.namespace),
        subjects=subjects,
        registry=registry,
        health=health,
        app=service_app(health, exported),
    )
    WireCounters(process.bus.counters, process.store, registry)
    health.add("bus", lambda: None if process.bus.is_connected else "not connected")
    health.add("service", lambda: None if process.is_started else "starting")
    health.add("store", lambda: None if process.has_joined else "not registered")
    health.add("drain", lambda: "draining" if process.is_draining else None)
    export_count(registry, "ready", "Whether /health/ready says so.", lambda: not health.reasons())
    export_count(registry, "draining", "Whether this process takes no more in.", lambda: process.is_draining)
    return process


async def _bring_up(process: ServiceProcess, start: Start) -> Running:
    await process.bus.connect()
    process.spawn(process.bus.wait_lost())
    config = process.config
    hosts = (config.service.advertise_host, config.transfer.host)
    process.spawn(watch_own_addresses(hosts, config.mesh.nats_url, config.mesh.heartbeat_s))
    await Tracing().serve(process.bus, process.subjects, process.service_id)
    running = await start(process)
    process.is_started = True
    try:
        await process.store.join(running.record, process.config.mesh.lease_s)
        process.has_joined = True
    except StoreUnavailable as exc:
        log.warning("store_not_joined", extra={"error": str(exc)})
    process.spawn(_keep_lease(process, running.describe or (lambda: running.record)))
    log.info("service_ready", extra={"kind": process.kind, "url": process.http_url})
    return running


async def _keep_lease(process: ServiceProcess, describe: Callable[[], MemberRecord]) -> None:
    """Renews every heartbeat. Ends the process only when a newer incarnation has taken its place. Of an
    instance its load report says that it drains, of others the record does."""
    while True:
        await asyncio.sleep(process.config.mesh.heartbeat_s)
        try:
            record = describe()
            if process.is_draining and isinstance(record, ServiceRecord):
                record = msgspec.structs.replace(record, is_draining=True)
            await process.store.update(record)
        except StoreUnavailable as exc:
            log.warning("lease_not_renewed", extra={"error": str(exc)})
        else:
            process.has_joined = True


async def _live(process: ServiceProcess, running: Running, stop: asyncio.Event, abort: asyncio.Event) -> None:
    """From ready to stopped. However it ends, the record is taken back and the service is closed."""
    try:
        await stop.wait()
        process.is_draining = True
        log.info("service_draining")
        process.bus.on_disconnect.append(abort.set)
        if process.bus.is_connected:
            await _unless(abort, _drain(process, running))
    finally:
        # The heartbeat must not write the record again.
        process._cancel_tasks()
        try:
            await process.store.leave()
        except StoreError as exc:
            log.warning("store_not_left", extra={"error": str(exc)})
        await running.close()


async def _drain(process: ServiceProcess, running: Running) -> None:
    timeout_s = process.config.mesh.drain_timeout_s
    try:
        async with asyncio.timeout(timeout_s + DRAIN_GRACE_S):
            await running.drain(timeout_s)
    except TimeoutError:
        log.warning("drain_expired", extra={"timeout_s": timeout_s})
    try:
        await process.bus.flush()
    except BusError as exc:
        log.warning("drain_unflushed", extra={"error": str(exc)})


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of ``work``, or None when ``event`` came first; ``work`` is then cancelled."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel_and_wait(task)
        await cancel_and_wait(waiter)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
