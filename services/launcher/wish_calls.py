"""Takes up what operators wish over the bus (the gateway's private port), where processes start and end."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from common.bus import Bus
from common.config import MeshConfig
from common.errors import BusError, InvalidRequest, LamellaError
from common.messages import Acknowledged, DrainWish, ScaleWish, WishNews
from common.subjects import Subjects
from services.launcher.wishes import CountWish, RoleChange, Wishes

log = logging.getLogger("lamella.wishes")

REFUSAL_S = 1.0
"""A wish that cannot be is refused within it; what takes longer is on its way."""
QUEUE = "launchers"
CONNECT_TIMEOUT_S = 30.0

Scale = Callable[[Wishes], Coroutine[Any, Any, list[RoleChange]]]
Drain = Callable[[str], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class WishCalls:
    """``scale`` and ``drain`` return when it is so, and raise a LamellaError where that cannot be.
    ``_bus``: the newest; ``_untold``: what came of wishes while it was away."""

    scale: Scale
    drain: Drain
    tasks: asyncio.TaskGroup
    subjects: Subjects
    _bus: Bus | None = None
    _untold: list[WishNews] = field(default_factory=list)

    async def serve(self, bus: Bus) -> None:
        """Returns when the subscriptions are active. Raises BusError."""
        self._bus = bus
        untold, self._untold = self._untold, []
        for news in untold:
            self._tell(news)
        await bus.serve(self.subjects.admin_scale(), ScaleWish, self._scale, queue=QUEUE)
        await bus.serve(self.subjects.admin_drain(), DrainWish, self._drain, queue=QUEUE)

    async def _scale(self, wish: ScaleWish) -> Acknowledged:
        log.info("scale_wished", extra={"role": wish.role, "count": wish.count})
        return await self._take_up(wish, self.scale({wish.role: CountWish(wish.count)}))

    async def _drain(self, wish: DrainWish) -> Acknowledged:
        log.info("drain_wished", extra={"id": wish.service_id})
        return await self._take_up(wish, self.drain(wish.service_id))

    async def _take_up(self, wish: ScaleWish | DrainWish, work: Coroutine[Any, Any, object]) -> Acknowledged:
        begun = WishNews(secrets.token_hex(4), wish, "under_way")
        task = self.tasks.create_task(_carry_out(work))
        await asyncio.wait({task}, timeout=REFUSAL_S)
        if not task.done():
            self._tell(begun)
            self.tasks.create_task(self._tell_end(begun, task))
            return Acknowledged()
        reason = task.result()
        if reason is not None:
            raise InvalidRequest(reason)
        self._tell(_ended(begun, None))
        return Acknowledged()

    async def _tell_end(self, begun: WishNews, carrying_out: "asyncio.Task[str | None]") -> None:
        self._tell(_ended(begun, await carrying_out))

    def _tell(self, news: WishNews) -> None:
        assert self._bus is not None, "wishes come over it"
        try:
            self._bus.publish(self.subjects.admin_news(), news)
        except BusError as exc:
            log.warning("wish_untold", extra={"wish": news.id, "error": str(exc)})
            self._untold.append(news)


def _ended(begun: WishNews, reason: str | None) -> WishNews:
    if reason is None:
        return WishNews(begun.id, begun.wish, "done")
    return WishNews(begun.id, begun.wish, "failed", reason)


async def _carry_out(work: Coroutine[Any, Any, object]) -> str | None:
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
        calls = WishCalls(scale, drain, tasks, subjects)
        while True:
            bus = Bus(mesh.nats_url, name=name, subjects=subjects)
            try:
                await bus.connect(CONNECT_TIMEOUT_S)
                await calls.serve(bus)
                await bus.wait_lost()
            except BusError as exc:
                log.warning("wishes_unheard", extra={"error": str(exc)})
                await asyncio.sleep(1.0)
            finally:
                await bus.close()
