"""Listens to the mesh for whoever looks at it, and only while somebody does.

On a connection of its own: every instance reports ten times a second and more, which is nothing that a
token's connection should wait behind, or a gateway that nobody watches pay for.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.errors import BusError, StoreError
from common.messages import AttentionUse, LinkTraffic, LoadReport, SchedulerEvent
from common.store import Store
from common.subjects import Subjects
from gateway.private.mesh_view import LeaderView, MeshNews, MeshView, pools_of
from gateway.private.wishes import WishLog

log = logging.getLogger("lamella.gateway")

IDLE_S = 30.0
"""Without a look, after which it stops listening."""
FIRST_LOOK_S = 1.0
"""How long the first look waits for everybody's report."""
CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class MeshWatch:
    """``run`` is to be spawned; ``look`` may then be called as often as one likes. ``wishes``: what this
    gateway takes from operators; ``wish_log``: what has come of that."""

    gateway_id: str
    model: str
    config: Config
    store: Store
    subjects: Subjects
    wishes: tuple[str, ...]
    wish_log: WishLog
    news: MeshNews = field(init=False)
    is_bus_connected: bool = False
    is_store_answering: bool = False
    _looked_s: float = 0.0
    _read_s: float | None = None
    _is_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.news = MeshNews(self.config.mesh.lease_s)

    async def look(self) -> MeshView:
        """The mesh as it is now; as it was last known, where store or bus are away."""
        now = self._looked_s = time.monotonic()
        if not self._is_wanted.is_set():
            self.news.begin(now)
            self._is_wanted.set()
        await self._read_store()
        if now - self.news.since_s < FIRST_LOOK_S:
            await self._wait_heard()
        now = time.monotonic()
        instances, services = self.news.instances(now), self.news.services(now)
        return MeshView(
            gateway=self.gateway_id,
            model=self.news.model or self.model,
            at_unix_s=time.time(),
            is_bus_connected=self.is_bus_connected,
            is_store_answering=self.is_store_answering,
            pools=pools_of(instances),
            instances=instances,
            links=self.news.links(now),
            schedulers=[each.id for each in services if each.kind == "scheduler"],
            services=services,
            leader=self.news.leader,
            plan=self.news.plan,
            wishes=list(self.wishes),
            wished=self.wish_log.views(),
        )

    async def run(self) -> None:
        """Listens whenever somebody looks. Runs until cancelled."""
        while True:
            await self._is_wanted.wait()
            try:
                await self._listen()
            except BusError as exc:
                log.warning("mesh_unheard", extra={"error": str(exc)})
                await asyncio.sleep(self.config.mesh.heartbeat_s)

    async def _listen(self) -> None:
        """Until nobody has looked for a while. Raises BusError."""
        bus = Bus(self.config.mesh.nats_url, name=f"{self.gateway_id}-watch", subjects=self.subjects)
        try:
            await bus.connect(CONNECT_TIMEOUT_S)
            await bus.subscribe(self.subjects.scheduler_events(), SchedulerEvent, self._take)
            await bus.subscribe(self.subjects.link_traffic(), LinkTraffic | AttentionUse, self._take)
            while time.monotonic() - self._looked_s < IDLE_S:
                self.is_bus_connected = bus.is_connected
                self._changed.set()
                await asyncio.sleep(self.config.mesh.heartbeat_s)
            self._is_wanted.clear()
        finally:
            self.is_bus_connected = False
            await bus.close()

    def _take(self, message: SchedulerEvent | LinkTraffic | AttentionUse) -> None:
        if isinstance(message, LoadReport | LinkTraffic | AttentionUse):
            self.news.take(message, time.monotonic())
            self._changed.set()

    async def _read_store(self) -> None:
        """At most once a heartbeat, however many look."""
        async with self._reading:
            now = time.monotonic()
            if self._read_s is not None and now - self._read_s < self.config.mesh.heartbeat_s:
                return
            try:
                members, leader = await self.store.members(), await self.store.leader()
                plan = None if self.config.scaling.policy == "off" else await self.store.read_plan()
            except StoreError as exc:
                self.is_store_answering = False
                log.warning("members_unread", extra={"error": str(exc)})
                return
            finally:
                self._read_s = time.monotonic()
            self.is_store_answering = True
            self.news.take_members(members)
            self.news.leader = None if leader is None else LeaderView(leader.service_id, leader.epoch)
            self.news.plan = plan

    async def _wait_heard(self) -> None:
        """Until every instance has reported, or it is clear that one does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + FIRST_LOOK_S):
                while not (self.is_bus_connected and self.news.has_heard_everyone):
                    self._changed.clear()
                    await self._changed.wait()
