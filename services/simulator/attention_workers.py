"""Attention workers in virtual time: their live states, and the pools that decode instances make of them.

A worker's state says whom it serves and with how many blocks (``attention.state``), a decode instance's needs
what makes a pool (``decode.attention_needs``), and its decode state where sequences go and move to.
Binding takes no time here. Whoever does not answer is given up as live: ``decode.remote_attention``'s time
after a step came to wait for it, as soon as schedulers have seen its process end, or a lease after it has
gone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from attention.state import (
    AttentionState,
    BindArrived,
    InstanceLost,
    KeepExpired,
    KeepKV,
    StartServing,
    UnbindArrived,
)
from common.ids import BindingId, InstanceId
from common.messages import InstanceLife, KVDestination
from common.messages.attention import BindAttention
from decode import events
from decode.attention_needs import AttentionNeeds
from decode.state import DecodeState
from services.simulator.attention_config import AttentionPool, RemoteAttention, bind_message
from services.simulator.attention_cost import Rows
from services.simulator.attention_engine import AttentionEngine, Lanes, SharedPace, WorkerUse
from services.simulator.attention_host import HostShare
from services.simulator.clock import Clock, Timer
from services.simulator.conditions import FINE, Conditions, Fares
from services.simulator.engine import EnginePass, EngineSettings
from services.simulator.network import Network


@dataclass(frozen=True, slots=True)
class BoundWorker:
    worker_id: str
    bind: BindAttention
    total_blocks: int

    @property
    def destination(self) -> KVDestination:
        """Its endpoint is a name in a mesh without memory."""
        heads = self.bind.first_head, self.bind.layout.kv_heads
        return KVDestination(self.worker_id.encode(), *heads, self.total_blocks)


@dataclass(slots=True, eq=False)
class KVPools:
    """One decode instance's. ``handle`` gives its state an event; ``next_pool``: the number that the next one
    will have. ``workers`` and ``destinations``: of each pool that there ever was. ``is_cut``: nobody is
    reached from it."""

    needs: AttentionNeeds
    life: InstanceLife
    shared: "AttentionWorkers"
    next_pool: Callable[[], int]
    handle: Callable[[events.DecodeEvent], None]
    workers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    destinations: dict[int, tuple[KVDestination, ...]] = field(default_factory=dict)
    bound: dict[int, tuple[BoundWorker, ...]] = field(default_factory=dict)
    is_cut: bool = False

    @property
    def others(self) -> Mapping[str, Fares]:
        return self.shared.others

    def is_waiting(self, rows: Rows) -> bool:
        if not (self.is_cut or self.shared.silent):
            return False
        return bool(self._unanswered(rows))

    def give_up(self, rows: Rows) -> None:
        for worker_id in self._unanswered(rows):
            self.lose(worker_id)

    def change_link(self, share: float) -> None:
        was_cut, self.is_cut = self.is_cut, share == 0
        if was_cut:
            self.look()

    def _unanswered(self, rows: Rows) -> list[str]:
        """Of those who are bound and whom the rows need."""
        needed = {
            worker_id for each in rows if each.pool in self.bound for worker_id in self.workers[each.pool]
        }
        return sorted(needed if self.is_cut else needed & self.shared.silent)

    def look(self) -> None:
        """Makes pools of workers that are free for it, in the order of their names."""
        if self.is_cut:
            return
        taken = {each.worker_id for members in self.bound.values() for each in members}
        there = sorted(self.shared.states.keys() - self.shared.silent)
        free = [worker_id for worker_id in there if worker_id not in taken]
        while self.needs.can_make_pool(len(self.bound), len(free)):
            chosen, free = free[: self.needs.pool_workers], free[self.needs.pool_workers :]
            self._open(
                tuple(
                    self.shared.bind(each, self.needs, index, self.life) for index, each in enumerate(chosen)
                )
            )

    def lose(self, worker_id: str) -> None:
        """And with it the pools that it was of, and what they held."""
        for pool, members in list(self.bound.items()):
            if all(each.worker_id != worker_id for each in members):
                continue
            del self.bound[pool]
            for each in members:
                self.shared.unbind(each)
            self.shared.pace.note_changed()
            self.handle(events.PoolLost(pool))
        self.look()

    def end(self, *, is_lost: bool) -> None:
        """The instance has: its workers keep for a while what it has not given up."""
        self.shared.users.remove(self)
        for each in [each for members in self.bound.values() for each in members]:
            if is_lost:
                self.shared.note_lost(each, self.life)
            else:
                self.shared.unbind(each)
        self.bound.clear()

    def _open(self, members: tuple[BoundWorker, ...]) -> None:
        pool = self.next_pool()
        self.bound[pool] = members
        self.workers[pool] = tuple(each.worker_id for each in members)
        self.destinations[pool] = tuple(each.destination for each in members)
        self.handle(events.PoolAdded(min(each.total_blocks for each in members)))


@dataclass(slots=True, eq=False)
class AttentionWorkers:
    """All of a mesh. ``pace``: of those who share them; ``use``: what they did. ``lease_s``: after which one
    that is gone is known to be, ``seen_s`` where its process's end is seen. ``others``: those that fare
    otherwise than they should; ``silent``: that answer nobody, as they are gone, hang or are cut off."""

    pool: AttentionPool
    clock: Clock
    network: Network
    lease_s: float
    seen_s: float
    pace: SharedPace = field(init=False)
    use: WorkerUse = field(default_factory=WorkerUse)
    states: dict[str, AttentionState] = field(default_factory=dict)
    users: list[KVPools] = field(default_factory=list)
    others: dict[str, Fares] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    _conditions: dict[str, Conditions] = field(default_factory=dict)
    _leases: dict[str, Timer] = field(default_factory=dict)
    _binding_ids: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        host = self.network.host
        self.pace = SharedPace(self.clock, None if host is None else HostShare(host))
        for worker_id in self.names:
            self.join(worker_id)

    @property
    def names(self) -> list[str]:
        return [f"{self.pool.config.name}-{number}" for number in range(self.pool.config.count)]

    def join(self, worker_id: str) -> None:
        """A worker, or its next life: then everybody knows that the one before is over."""
        lease = self._leases.pop(worker_id, None)
        if lease is not None:
            self.clock.cancel(lease)
        self._lose(worker_id)
        self.states[worker_id] = self.pool.new_state(worker_id)
        self.network.add(InstanceId(worker_id), self.pool.link_bytes_per_s)
        self._look_at(worker_id)

    def die(self, worker_id: str, *, is_seen: bool) -> None:
        """It is gone without a word, with what it held. ``is_seen``: everybody hears of its end soon; else
        who waits for it finds out, and later everybody."""
        state = self.states.pop(worker_id, None)
        if state is None:
            return
        self.network.end(InstanceId(worker_id))
        self._look_at(worker_id)
        known_s = self.seen_s if is_seen else self.lease_s
        self._leases[worker_id] = self.clock.after(known_s, partial(self._lose, worker_id))

    def fare(self, worker_id: str, conditions: Conditions) -> None:
        """Whichever life of it is there."""
        self._conditions[worker_id] = conditions
        self._look_at(worker_id)

    def _look_at(self, worker_id: str) -> None:
        """Whether it answers, and how it fares, after that may have changed."""
        self.pace.catch_up()
        conditions, is_there = self._conditions.get(worker_id), worker_id in self.states
        fares, hangs = FINE, False
        if conditions is not None:
            fares, hangs = Fares(conditions.slowness, conditions.link_share), conditions.silences > 0
        if is_there:
            self.network.pace(InstanceId(worker_id), fares.link_share)
        self.others[worker_id] = fares
        if fares == FINE:
            del self.others[worker_id]
        if hangs or not is_there or fares.link_share == 0:
            self.silent.add(worker_id)
        else:
            self.silent -= {worker_id}
        self.pace.note_changed()
        self.pace.settle()
        for user in self.users:
            user.look()

    def _lose(self, worker_id: str) -> None:
        for user in self.users:
            user.lose(worker_id)
        self.pace.settle()

    def check(self) -> None:
        """Invariants, called after a run: every worker serves those that say so, and nobody else."""
        for state in self.states.values():
            state.check()
        served = {each for state in self.states.values() for each in state.bindings}
        bound = [each for user in self.users for members in user.bound.values() for each in members]
        there = {each.bind.binding_id for each in bound if each.worker_id in self.states}
        assert there == served, "a worker and an instance disagree"
        assert not self.pace.courses, "steps go on"

    def bind(self, worker_id: str, needs: AttentionNeeds, index: int, life: InstanceLife) -> BoundWorker:
        """Raises as the worker's state does."""
        binding_id = BindingId(f"binding-{next(self._binding_ids)}")
        bind = bind_message(needs, index, life, binding_id)
        commands = self.states[worker_id].handle(BindArrived(bind))
        [start] = (each for each in commands if isinstance(each, StartServing))
        return BoundWorker(worker_id, bind, start.total_blocks)

    def note_lost(self, bound: BoundWorker, life: InstanceLife) -> None:
        state = self.states.get(bound.worker_id)
        if state is None:
            return
        for command in state.handle(InstanceLost(life.instance_id, life.incarnation)):
            if isinstance(command, KeepKV):
                self.clock.after(command.keep_s, partial(self._drop, state, command.binding_id))

    def _drop(self, state: AttentionState, binding_id: BindingId) -> None:
        state.handle(KeepExpired(binding_id))

    def unbind(self, bound: BoundWorker) -> None:
        state = self.states.get(bound.worker_id)
        if state is not None:
            state.handle(UnbindArrived(bound.bind.binding_id))


@dataclass(frozen=True, slots=True)
class RemoteUse:
    """How the instances of a decode pool use a mesh's attention workers."""

    attention: RemoteAttention
    workers: AttentionWorkers

    def pools_for(
        self, life: InstanceLife, state: DecodeState, handle: Callable[[events.DecodeEvent], None]
    ) -> KVPools:
        """None of them yet."""
        needs = self.attention.needs
        pools = KVPools(needs, life, self.workers, lambda: state.blocks.next_pool, handle)
        self.workers.users.append(pools)
        return pools

    def engine_for(
        self,
        lanes: Lanes,
        pools: KVPools,
        settings: EngineSettings,
        note_pass: Callable[[EnginePass], None] | None,
    ) -> AttentionEngine:
        attention, workers = self.attention, self.workers
        engine = AttentionEngine(
            workers.clock,
            lanes,
            attention.cost,
            attention.turns,
            workers.pace,
            pools,
            workers.use,
            note_pass,
        )
        engine.change_settings(settings)
        return engine
