"""Takes up what operators wish over the bus (the gateway's private port), where processes start and end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from common.bus import Bus
from common.config import MeshConfig
from common.errors import BusError, InvalidRequest, LamellaError
from common.messages import Acknowledged, DrainWish, ScaleWish
from common.subjects import Subjects
from services.launcher.wishes import CountWish, RoleChange, Wishes

log = logging.getLogger("lamella.wishes")

REFUSAL_S = 1.0
"""A wish that cannot be is refused within it; what takes longer is on its way."""
QUEUE = "launchers"
CONNECT_TIMEOUT_S = 30.0

Scale = Callable[[Wishes], Coroutine[Any, Any, list[RoleChange]]]
Drain = Callable[[str], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class WishCalls:
    """``scale`` and ``drain`` return when it is so, and raise a LamellaError where that cannot be."""

    scale: Scale
    drain: Drain
    tasks: asyncio.TaskGroup

    async def serve(self, bus: Bus, subjects: Subjects) -> None:
        """Returns when the subscriptions are active. Raises BusError."""
        await bus.serve(subjects.admin_scale(), ScaleWish, self._scale, queue=QUEUE)
        await bus.serve(subjects.admin_drain(), DrainWish, self._drain, queue=QUEUE)

    async def _scale(self, wish: ScaleWish) -> Acknowledged:
        log.info("scale_wished", extra={"role": wish.role, "count": wish.count})
        return await self._take_up(self.scale({wish.role: CountWish(wish.count)}))

    async def _drain(self, wish: DrainWish) -> Acknowledged:
        log.info("drain_wished", extra={"id": wish.service_id})
        return await self._take_up(self.drain(wish.service_id))

    async def _take_up(self, work: Coroutine[Any, Any, object]) -> Acknowledged:
        task = self.tasks.create_task(_carry_out(work))
        await asyncio.wait({task}, timeout=REFUSAL_S)
        reason = task.result() if task.done() else None
        if reason is not None:
            raise InvalidRequest(reason)
        return Acknowledged()


async def _carry_out(work: Awaitable[object]) -> str | None:
    """Why it did not come about."""
    try:
        await work
    except LamellaError as exc:
        log.warning("wish_failed", extra={"error": str(exc)})
        return str(exc)
    return None


async def answer_wishes(mesh: MeshConfig, name: str, scale: Scale, drain: Drain) -> None:
    """Runs until cancelled, whether NATS is there or not. ``name``: of the connection."""
    subjects = Subjects(mesh.namespace)
    # What is being carried out goes on when the connection is lost.
    async with asyncio.TaskGroup() as tasks:
        calls = WishCalls(scale, drain, tasks)
        while True:
            bus = Bus(mesh.nats_url, name=name, subjects=subjects)
            try:
                await bus.connect(CONNECT_TIMEOUT_S)
                await calls.serve(bus, subjects)
                await bus.wait_lost()
            except BusError as exc:
                log.warning("wishes_unheard", extra={"error": str(exc)})
                await asyncio.sleep(1.0)
            finally:
                await bus.close()
