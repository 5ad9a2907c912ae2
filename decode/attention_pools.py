"""Keeps a decode instance's pools in line with the attention workers that there are.

Looks at the members every so often: binds workers that have come, gives up pools whose worker is gone or
silent, and leaves workers that drain once their last sequence here has ended. The decisions about sequences
are the state's (``decode.state``); this only carries workers in and out.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import BusError, StoreError
from common.ids import Incarnation
from common.messages import (
    AttentionDraining,
    AttentionGone,
    AttentionUse,
    InstanceEvent,
    KVDestination,
    ServiceRecord,
    WorkerUse,
)
from common.store import Store
from decode import events
from decode.binding import AttentionNotFree, AttentionUnavailable, Binder, Binding
from decode.inheritance import BoundWorker
from decode.remote_attention import Pools
from decode.settling import FAR_SENDER_SETTLES_S
from decode.state import DecodeState

log = logging.getLogger("lamella.decode")

READY_TIMEOUT_S = 60.0
"""For as many workers as wanted to be there and free."""
LOOK_S = 0.25
USE_S = 1.0


def _new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class AttentionPools:
    """``destinations`` is the table by which KV finds its pool, ``workers`` that by which a former life's is
    found, ``silent`` are pools that do not answer. ``handle`` gives the state an event.

    ``_lives``: of workers in the store; ``_ended``: those of them of which schedulers have told the end.
    """

    binder: Binder
    store: Store
    state: DecodeState
    pools: Pools
    destinations: dict[int, tuple[KVDestination, ...]]
    workers: dict[int, tuple[BoundWorker, ...]]
    silent: set[int]
    handle: Callable[[events.DecodeEvent], None]
    _bound: dict[int, list[Binding]] = field(default_factory=dict)
    _reserve: list[Binding] = field(default_factory=list)
    _silent: list[Binding] = field(default_factory=list)
    _closing: set[int] = field(default_factory=set)
    _refused: dict[Incarnation, AttentionUnavailable] = field(default_factory=dict)
    _not_free: dict[Incarnation, str] = field(default_factory=dict)
    _ended: set[Incarnation] = field(default_factory=set)
    _lives: set[Incarnation] = field(default_factory=set)
    _free: int = 0
    _ready: asyncio.Future[None] = field(default_factory=_new_future)

    @property
    def bindings(self) -> int:
        """Workers that serve this instance, or are to."""
        return sum(map(len, self._bound.values())) + len(self._reserve)

    @property
    def unsettled(self) -> int:
        """Bindings that were given up, of which the worker does not know."""
        return len(self._silent)

    async def wait_ready(self) -> None:
        """Returns when the workers wanted are bound. Raises AttentionUnavailable, at once where those that
        can serve this model are too few and another never can."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._ready
        except TimeoutError:
            needs = self.binder.needs
            found = self.bindings + self._free
            raise AttentionUnavailable(
                f"{found} of instance.attention_workers = {needs.workers} attention workers were free within"
                f" {READY_TIMEOUT_S:g} s" + "".join(f"; {why}" for why in self._not_free.values())
            ) from None

    def take_event(self, message: InstanceEvent) -> None:
        match message:
            case AttentionDraining():
                self._close_pool_of(message)
            case AttentionGone():
                self._lose_pool_of(message)

    def _close_pool_of(self, draining: AttentionDraining) -> None:
        """Its worker gets no new sequences."""
        for pool, bindings in self._bound.items():
            if pool not in self._closing and any(b.binding_id == draining.binding_id for b in bindings):
                log.info("attention_pool_closed", extra={"pool": pool, "worker": draining.worker_id})
                self._closing.add(pool)
                self.handle(events.PoolClosed(pool))

    def _lose_pool_of(self, gone: AttentionGone) -> None:
        """Amid a step, too: whoever waits for it waits no more."""
        self._ended.add(gone.incarnation)
        if any(each.record.incarnation == gone.incarnation for each in self._reserve):
            self._give_up_reserve()
        for pool, bindings in list(self._bound.items()):
            if any(each.record.incarnation == gone.incarnation for each in bindings):
                self.pools.lose(pool, f"attention worker {gone.worker_id}: its process has ended")

    async def run(self) -> None:
        """Until cancelled."""
        running = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settle_silent())
            tasks.create_task(self._tell_use())

            def on_loss() -> None:
                running.call_soon_threadsafe(lambda: tasks.create_task(self._give_up_lost()))

            self.pools.on_loss = on_loss
            try:
                while True:
                    workers = await self._workers()
                    if workers is not None:
                        await self._look(workers)
                    await asyncio.sleep(LOOK_S)
            finally:
                self.pools.on_loss = lambda: None

    async def _give_up_lost(self) -> None:
        """Before the step that found it lost has ended: its sequences would come back here, and break again,
        until the next look."""
        for pool in self.pools.lost:
            if pool in self._bound:
                self._lose(pool)

    @property
    def use(self) -> dict[str, WorkerUse]:
        """By worker. With the heads partitioned each of a pool's workers has its share of every token."""
        blocks, block_size = self.state.blocks, self.binder.needs.layout.block_size
        sequences = Counter(blocks.pool_of(owner) for owner in blocks.owners())
        found: dict[str, WorkerUse] = {}
        for pool, bindings in self._bound.items():
            total, free = blocks.total_blocks_in(pool), blocks.free_blocks_in(pool)
            use = WorkerUse(sequences[pool], block_size * (total - free), block_size * total)
            found |= {binding.record.service_id: use for binding in bindings}
        return found

    async def _tell_use(self) -> None:
        """Nobody waits for it: what the bus cannot take is lost."""
        binder = self.binder
        while True:
            try:
                binder.bus.publish(binder.subjects.link_traffic(), AttentionUse(binder.instance_id, self.use))
            except BusError as exc:
                log.warning("attention_use_untold", extra={"error": str(exc)})
            await asyncio.sleep(USE_S)

    async def _settle_silent(self) -> None:
        """A worker that was given up holds memory for this instance until it is told, or ends. Of one on
        another host that is nobody's member any more nothing lands after a while."""
        while True:
            for binding in list(self._silent):
                if binding.exchange.is_gone() or self._is_long_over(binding):
                    await self.binder.forget(binding)
                    self._silent.remove(binding)
                elif await self.binder.unbind(binding):
                    self._silent.remove(binding)
            await asyncio.sleep(LOOK_S)

    def _is_long_over(self, binding: Binding) -> bool:
        if binding.pidfd is not None or binding.given_up_s is None:
            return False
        is_member = binding.record.incarnation in self._lives
        waited_s = asyncio.get_running_loop().time() - binding.given_up_s
        return not is_member and waited_s >= FAR_SENDER_SETTLES_S

    def _give_up(self, bindings: list[Binding]) -> None:
        """Until their workers know."""
        for each in bindings:
            each.given_up_s = asyncio.get_running_loop().time()
        self._silent += bindings

    def _give_up_reserve(self) -> None:
        self._give_up(self._reserve)
        self._reserve = []

    async def close(self) -> None:
        """The workers learn at once that this life is over, those that answer."""
        bindings = [*self._reserve, *(each for bindings in self._bound.values() for each in bindings)]
        await asyncio.gather(*(self.binder.unbind(binding) for binding in bindings))

    async def _workers(self) -> dict[str, ServiceRecord] | None:
        try:
            members = await self.store.members()
        except StoreError as exc:
            log.warning("members_unread", extra={"error": str(exc)})
            return None
        return {
            record.service_id: record
            for record in members
            if isinstance(record, ServiceRecord) and record.kind == "attention"
        }

    async def _look(self, workers: dict[str, ServiceRecord]) -> None:
        lives = self._lives = {record.incarnation for record in workers.values()}
        self._ended &= lives
        self._refused = {life: why for life, why in self._refused.items() if life in lives}
        self._not_free = {life: why for life, why in self._not_free.items() if life in lives}
        for pool, bindings in list(self._bound.items()):
            if pool not in self._bound:  # lost meanwhile
                continue
            if pool in self.silent:
                self.pools.lose(pool, "its worker does not answer")
            if pool in self.pools.lost or not all(_is_there(each, workers) for each in bindings):
                self._lose(pool)
            elif pool in self._closing and self.state.blocks.is_unused(pool):
                await self._leave(pool)
        if not all(_is_there(each, workers) for each in self._reserve):
            self._give_up_reserve()
        if self.state.is_admitting:
            await self._bind_new(workers)
        if self._refused and not self._ready.done():
            self._ready.set_exception(next(iter(self._refused.values())))

    async def _bind_new(self, workers: dict[str, ServiceRecord]) -> None:
        needs = self.binder.needs
        used = [*self._reserve, *self._silent, *(each for bound in self._bound.values() for each in bound)]
        taken = {binding.record.service_id for binding in used}
        free = [
            record
            for worker_id, record in sorted(workers.items())
            if worker_id not in taken and record.incarnation not in self._refused
        ]
        self._free = len(free)
        # Together, in the order of their names: a next life has each head where this one had it.
        if not needs.can_make_pool(len(self._bound), len(self._reserve) + len(free)):
            return
        for record in free:
            binding = await self._try_bind(record)
            if binding is None:
                if needs.partition == "heads" and len(self._reserve) + self._free <= needs.pool_workers:
                    # Its next life will be there; without it the others would have other heads than before.
                    return
                continue
            self._free -= 1
            self._reserve.append(binding)
            if len(self._reserve) == needs.pool_workers:
                self._open(self._reserve)
                self._reserve = []
                if needs.partition == "heads":
                    return

    async def _try_bind(self, record: ServiceRecord) -> Binding | None:
        """None where it is not to be had now, or never: then that life of it is not asked again."""
        if record.incarnation in self._ended:
            return None
        index = len(self._reserve)
        try:
            binding = await self.binder.bind(record, index)
        except AttentionNotFree as exc:
            # It is asked at every look, and says the same each time.
            if self._not_free.get(record.incarnation) != str(exc):
                log.warning("attention_worker_not_free", extra={"error": str(exc)})
                self._not_free[record.incarnation] = str(exc)
            return None
        except AttentionUnavailable as exc:
            log.warning("attention_worker_unusable", extra={"error": str(exc)})
            self._refused[record.incarnation] = exc
            return None
        self._not_free.pop(record.incarnation, None)
        if record.incarnation in self._ended or len(self._reserve) != index:
            # It has ended meanwhile, or another of the pool that it was to be of has.
            self._give_up([binding])
            return None
        return binding

    def _open(self, bindings: list[Binding]) -> None:
        """A pool of these workers. Everybody who uses it knows it before a sequence can be placed there."""
        pool = self.state.blocks.next_pool
        self.pools.add(pool, tuple(binding.exchange for binding in bindings))
        self.destinations[pool] = tuple(binding.destination for binding in bindings)
        self.workers[pool] = tuple(
            BoundWorker(binding.record.service_id, binding.binding_id) for binding in bindings
        )
        self._bound[pool] = bindings
        blocks = min(binding.destination.total_blocks for binding in bindings)
        log.info("attention_pool_opened", extra={"pool": pool, "blocks": blocks})
        self.handle(events.PoolAdded(blocks))
        if sum(map(len, self._bound.values())) >= self.binder.needs.workers and not self._ready.done():
            self._ready.set_result(None)

    def _lose(self, pool: int) -> None:
        bindings = self._bound.pop(pool)
        reason = self.pools.lost.get(pool, "its worker is no longer a member")
        log.error("attention_pool_lost", extra={"pool": pool, "error": reason})
        self.pools.remove(pool)
        del self.destinations[pool]
        del self.workers[pool]
        self._closing.discard(pool)
        self.silent.discard(pool)
        self._give_up(bindings)
        self.handle(events.PoolLost(pool))

    async def _leave(self, pool: int) -> None:
        log.info("attention_pool_left", extra={"pool": pool})
        bindings = self._bound.pop(pool)
        self._closing.discard(pool)
        self.pools.remove(pool)
        del self.destinations[pool]
        del self.workers[pool]
        self.handle(events.PoolLeft(pool))
        for binding in bindings:
            if not await self.binder.unbind(binding):
                self._give_up([binding])


def _is_there(binding: Binding, workers: dict[str, ServiceRecord]) -> bool:
    """Whether that life of the worker goes on, as far as the kernel and the store know."""
    if binding.exchange.is_gone():
        return False
    record = workers.get(binding.record.service_id)
    if record is None:
        # A store that has lost its leases says nothing about a process that the kernel knows.
        return binding.pidfd is not None
    return record.incarnation == binding.record.incarnation
