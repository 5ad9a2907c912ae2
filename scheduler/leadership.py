"""Which of several schedulers does what only one may: role changes, how many instances there are.

The lead is a lease in the store with an epoch that grows. Who has it says so every half heartbeat, so
instances refuse what an earlier leader still sends (``common.epochs``): one that was stopped and woken, or
cut off, commands nobody. Who is cut off from the bus alone gives the lead up. Losing the store, or the lease:
nobody leads, and all that runs goes on.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import MeshConfig
from common.errors import BusError, StoreError
from common.ids import Incarnation
from common.messages import LeaderAnnounced
from common.store import Store
from common.subjects import Subjects
from scheduler.lease import LeaderLease
from scheduler.metrics import LeaderMetrics

log = logging.getLogger("lamella.scheduler")

LEASE_SHARE = 2 / 3
"""Of ``mesh.lease_s``: a leader that dies is followed within that, with some time to spare."""
RENEWALS_PER_HEARTBEAT = 2
AFTER_EXPIRY_S = 0.01


@dataclass(slots=True)
class Leadership:
    """Reads the clock itself: the loop's stands still while a callback runs, or the process is stopped."""

    store: Store
    bus: Bus
    subjects: Subjects
    service_id: str
    incarnation: Incarnation
    mesh: MeshConfig
    metrics: LeaderMetrics
    lease: LeaderLease = field(init=False)
    has_resigned: bool = False
    _claiming: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_vacant: asyncio.Event = field(default_factory=asyncio.Event)
    _said: int | None = None

    def __post_init__(self) -> None:
        self.lease = LeaderLease(self.mesh.lease_s * LEASE_SHARE)
        self.metrics.follow(lambda: self.epoch)

    @property
    def epoch(self) -> int | None:
        """With which this scheduler leads now; None: it does not. To be read at each act, and sent along."""
        return self.lease.epoch_at(time.monotonic())

    async def start(self) -> None:
        """Returns when it hears of other leaders."""
        await self.bus.subscribe(self.subjects.leader(), LeaderAnnounced, self._hear)

    async def keep(self) -> None:
        """Takes the lead when it is free and keeps it, until it has resigned."""
        while not self.has_resigned:
            self._is_vacant.clear()
            wait_s = await self._claim()
            try:
                async with asyncio.timeout(wait_s):
                    await self._is_vacant.wait()
            except TimeoutError:
                pass
            self._note_change()

    async def resign(self) -> None:
        """Gives the lead up for good; another may have it at once."""
        if self.has_resigned:
            return
        self.has_resigned = True
        async with self._claiming:
            epoch = self.epoch
            self._is_vacant.set()
            await self._give_up()
        if epoch is not None:
            self._announce(epoch, is_leaving=True)

    async def _give_up(self) -> None:
        self.lease.give_up()
        self._note_change()
        try:
            await self.store.resign_lead(self.incarnation)
        except StoreError as exc:
            log.warning("lead_not_resigned", extra={"error": str(exc)})

    async def _claim(self) -> float:
        """Seconds after which to try again."""
        renewal_s = self.mesh.heartbeat_s / RENEWALS_PER_HEARTBEAT
        async with self._claiming:
            if self.has_resigned:
                return 0.0
            if not self.bus.is_connected:
                # Whoever is cut off commands nobody, and keeps nobody else from it.
                if self.epoch is not None:
                    await self._give_up()
                return renewal_s
            asked_s = time.monotonic()
            try:
                leader = await self.store.claim_lead(
                    self.service_id, self.incarnation, self.lease.lease_s, self.lease.others.highest
                )
            except StoreError as exc:
                log.warning("lead_not_claimed", extra={"error": str(exc)})
                return renewal_s
            if leader.incarnation != self.incarnation:
                self.lease.hear(leader.epoch)
                return min(self.mesh.heartbeat_s, leader.remaining_s + AFTER_EXPIRY_S)
            self.lease.grant(leader.epoch, asked_s)
        self._note_change()
        if (epoch := self.epoch) is not None:
            self._announce(epoch)
        return renewal_s

    def _hear(self, message: LeaderAnnounced) -> None:
        if message.incarnation == self.incarnation:
            return
        self.lease.hear(message.epoch)
        self._note_change()
        if message.is_leaving:
            self._is_vacant.set()

    def _announce(self, epoch: int, *, is_leaving: bool = False) -> None:
        message = LeaderAnnounced(self.service_id, self.incarnation, epoch, is_leaving)
        try:
            self.bus.publish(self.subjects.leader(), message)
        except BusError as exc:
            log.warning("leader_unannounced", extra={"error": str(exc)})

    def _note_change(self) -> None:
        epoch, before = self.epoch, self._said
        if epoch == before:
            return
        self._said = epoch
        if before is not None:
            log.warning("lead_ended", extra={"epoch": before})
        if epoch is not None:
            log.info("leads", extra={"epoch": epoch})
