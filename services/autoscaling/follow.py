"""Makes a mesh follow its schedulers' plans and operators' wishes, by a connector, until it is told to stop.

A relay inside the mesh says both (``services.autoscaling.relay``). One that ends, with the container that it
runs in, is started again; what is being carried out meanwhile goes on.
"""

import asyncio
import contextlib
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from common.cancellation import cancel_and_wait
from common.errors import LamellaError, LauncherError, first_reason
from common.messages import DrainWish, ScaleWish
from common.scaling import DesiredCounts, ScaledRole, ScaledService
from common.signals import listen_to_signals
from services.autoscaling.lines import (
    MAX_LINE_BYTES,
    Answered,
    Began,
    Line,
    Planned,
    Wished,
    decode_line,
    encode,
)
from services.connectors.connector import Connector
from services.launcher.autoscale import follow_plans
from services.launcher.autoscale import log as scaling_log
from services.launcher.wishes import CountWish, Wishes, say_change

log = logging.getLogger(f"{scaling_log.name}.mesh")

RETRY_S = 5.0
END_TIMEOUT_S = 5.0
MAX_SHOWN = 200


class RelayEnded(LauncherError):
    """It could not be run where the mesh is, or does not run any more; its own words stand before."""


class NothingToFollow(LauncherError):
    """The mesh is configured so that nobody plans, or that somebody else follows the plans."""


async def autoscale(connector: Connector, *, is_dry_run: bool) -> None:
    """Returns at SIGTERM or SIGINT. ``is_dry_run``: says what it would do, and hears no wishes.

    Raises NothingToFollow; RelayEnded or MeshNotRunning where no relay ever began."""
    stop, _ = listen_to_signals()
    running = asyncio.create_task(_autoscale(connector, is_dry_run))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await cancel_and_wait(stopping)
    # Once: what is being carried out has programs to end.
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _autoscale(connector: Connector, is_dry_run: bool) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            await Autoscaler(connector, tasks, is_dry_run).run()
    except BaseExceptionGroup as group:
        raise first_reason(group) from group


@dataclass(slots=True)
class Autoscaler:
    """``tasks`` owns what is being carried out. ``latest``: plan of the relay that runs."""

    connector: Connector
    tasks: asyncio.TaskGroup
    is_dry_run: bool
    latest: DesiredCounts | None = None
    _has_begun: bool = False
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Until cancelled. Raises as ``autoscale``."""
        while True:
            try:
                await self._follow_relay()
            except NothingToFollow:
                raise
            except LauncherError as exc:
                if not self._has_begun:
                    raise
                log.warning("relay_ended", extra={"error": str(exc), "again_in_s": RETRY_S})
            await asyncio.sleep(RETRY_S)

    async def _follow_relay(self) -> None:
        """Until it ends. Raises RelayEnded, NothingToFollow, MeshNotRunning."""
        options = () if self.is_dry_run or self.connector.hears_wishes else ("--wishes",)
        async with _running(self.connector.inside("relay", *options)) as relay:
            began = await _next_line(relay)
            if not isinstance(began, Began):
                raise RelayEnded(f"the relay began with {began}")
            self._begin(began)
            self.latest = None
            following = self.tasks.create_task(
                follow_plans(
                    self._read_plan,
                    self._scale,
                    self.connector.following_load,
                    began.window_s,
                    is_dry_run=self.is_dry_run,
                )
            )
            try:
                while True:
                    match await _next_line(relay):
                        case Planned(plan):
                            self.latest = plan
                        case Wished(number, wish):
                            self.tasks.create_task(self._fulfil(relay, number, wish))
            finally:
                await cancel_and_wait(following)

    def _begin(self, began: Began) -> None:
        """Raises NothingToFollow."""
        if began.roles != "fixed":
            raise NothingToFollow(f"[roles] policy = {began.roles!r} changes the counts itself")
        if began.policy == "on" and self.connector.hears_wishes and not self.is_dry_run:
            raise NothingToFollow("this mesh follows its plans already: it was started with --autoscale")
        if began.policy == "off" and (self.connector.hears_wishes or self.is_dry_run):
            raise NothingToFollow(
                "nothing is planned: start the mesh with `lamella up --autoscale --dry-run`, or with"
                ' [scaling] policy = "dry_run" in its settings'
            )
        if began.policy == "off":
            log.warning("only_wishes", extra={"why": '[scaling] policy = "off": the schedulers plan nothing'})
        self._has_begun = True
        services = ", ".join(sorted(self.connector.following_load))
        log.info("following", extra={"services": services, "dry_run": self.is_dry_run})

    async def _read_plan(self) -> DesiredCounts | None:
        return self.latest

    async def _scale(self, counts: Mapping[ScaledService, int]) -> None:
        """Raises LauncherError. Goes on where who waits for it is cancelled."""
        wishes: dict[ScaledRole, CountWish] = {service: CountWish(count) for service, count in counts.items()}
        refusal = await asyncio.shield(self.tasks.create_task(self._apply(wishes)))
        if refusal is not None:
            raise LauncherError(refusal)

    async def _fulfil(self, relay: Process, number: int, wish: ScaleWish | DrainWish) -> None:
        match wish:
            case ScaleWish(role, count):
                refusal = await self._apply({role: CountWish(count)})
            case DrainWish(service_id):
                refusal = await self._drain(service_id)
        assert relay.stdin is not None
        relay.stdin.write(encode(Answered(number, refusal)) + b"\n")

    async def _apply(self, wishes: Wishes) -> str | None:
        """Why it did not come about."""
        async with self._one_at_a_time:
            try:
                changes = await self.connector.apply(wishes)
            except LamellaError as exc:
                log.warning("not_scaled", extra={"error": str(exc)})
                return str(exc)
        for change in changes:
            log.info("scaled", extra={"change": say_change(change)})
        return None

    async def _drain(self, service_id: str) -> str | None:
        """Why it did not come about. Waits for no scaling, which may be waiting for that process."""
        try:
            await self.connector.drain(service_id)
        except LamellaError as exc:
            log.warning("not_drained", extra={"id": service_id, "error": str(exc)})
            return str(exc)
        log.info("drained", extra={"id": service_id})
        return None


@asynccontextmanager
async def _running(command: tuple[str, ...]) -> AsyncIterator[Process]:
    """A relay, which ends when its standard input does. Raises RelayEnded where it cannot be run."""
    try:
        # Ctrl-C is for the autoscaler.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES, start_new_session=True
        )
    except OSError as exc:
        raise RelayEnded(f"{command[0]} cannot be run here ({exc.strerror})") from exc
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _next_line(relay: Process) -> Line:
    """Raises RelayEnded."""
    assert relay.stdout is not None
    said = await relay.stdout.readline()
    if not said:
        raise RelayEnded(f"`lamella relay` ended with {await relay.wait()}")
    try:
        line: Line = decode_line(said)
    except msgspec.DecodeError as exc:
        raise RelayEnded(f"`lamella relay` said something else: {said[:MAX_SHOWN]!r}") from exc
    return line
