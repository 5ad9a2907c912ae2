"""A simulated mesh, put together from its settings: instances, scheduler, gateway and what connects them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.config import Config
from common.errors import RequestError
from common.ids import Incarnation, InstanceId
from common.lengths import certain
from common.messages import (
    InstanceGone,
    InstanceLife,
    InstanceRecord,
    KVLinkFailed,
    KVLinkWorks,
    MemberRecord,
    Placement,
    PlaceMoved,
)
from common.performance import DEFAULT_CHUNK_TOKENS
from gateway.losses import Losses
from scheduler.membership import SEEN_AFTER_S
from services.hosts.load_report import asked_by
from services.hosts.measured_speed import MeasuredSpeed
from services.simulator.attention_workers import AttentionWorkers, RemoteUse
from services.simulator.clock import Clock, Timer
from services.simulator.conditions import Conditions, SlowedPerformance
from services.simulator.config import Pool, Simulated
from services.simulator.engine import EngineSettings
from services.simulator.gateway import RECORD, SimulatedGateway
from services.simulator.history import FOR_GOOD, History
from services.simulator.host import Host
from services.simulator.instance import SimulatedInstance, Surroundings
from services.simulator.instance_states import states_of
from services.simulator.links import Links
from services.simulator.measured_speed import measured_speed_of
from services.simulator.network import Network
from services.simulator.operator_metrics import OperatorTally
from services.simulator.performance.interface import OperatorTimes
from services.simulator.records import Records
from services.simulator.scheduler import SimulatedScheduler
from services.simulator.schedulers import Schedulers
from services.simulator.staff import Staff
from services.simulator.stages import stage_shares
from services.simulator.timeline import SimulatedTimeline


@dataclass(slots=True)
class _Reporter:
    """When an instance reports (``common.load``): soon after a change, ``gap_s`` apart, and every interval,
    or when it has nothing to do every ``idle_s``. ``report`` does it."""

    instance: SimulatedInstance
    conditions: Conditions
    gap_s: float
    interval_s: float
    idle_s: float
    timer: Timer
    newest_s: float = float("-inf")
    report: Callable[[], None] = field(init=False)


@dataclass(slots=True)
class Cluster:
    """``instances``: that live; ``former``: lives that are over. ``on_join`` hears of every
    life that begins. ``tallies``: of the pools whose operators' times are asked for and known.
    ``history``: of all that changes beside requests."""

    simulated: Simulated
    clock: Clock
    network: Network
    gateway: SimulatedGateway
    records: Records
    is_exact: bool
    tallies: Mapping[str, OperatorTally] = field(default_factory=dict)
    instances: dict[InstanceId, SimulatedInstance] = field(default_factory=dict)
    former: list[SimulatedInstance] = field(default_factory=list)
    pool_of: dict[InstanceId, str] = field(default_factory=dict)
    on_join: list[Callable[[SimulatedInstance], None]] = field(default_factory=list)
    history: History = field(init=False)
    schedulers: Schedulers = field(init=False)
    staff: Staff = field(init=False)
    _conditions: dict[InstanceId, Conditions] = field(default_factory=dict)
    _speeds: dict[tuple[str, float], MeasuredSpeed] = field(default_factory=dict)
    workers: AttentionWorkers | None = field(init=False, default=None)
    _reporters: dict[InstanceId, _Reporter] = field(default_factory=dict)
    _lives: int = 0

    def __post_init__(self) -> None:
        self.history = History(self.clock)
        config = self.simulated.settings
        kind = config.predictor.kind
        predict = None if kind != "oracle" else lambda request: certain(self.gateway.length_left(request, 0))
        self.schedulers = Schedulers(
            tuple(
                SimulatedScheduler(
                    config, self, f"scheduler-{number + 1}", is_leader=number == 0, predict=predict
                )
                for number in range(self.simulated.cluster.schedulers)
            )
        )
        self.staff = Staff(
            self.clock,
            self.simulated.pools,
            self._join,
            self._drain,
            self.instances.__contains__,
            self.history,
        )
        self.gateway.submit = lambda request, lost, answer: self.network.tell(
            lambda: self.schedulers.submit(
                request, lost, lambda reply: self.network.tell(lambda: answer(reply))
            )
        )
        self.gateway.tell_ended = self.schedulers.tell_end
        self.gateway.cancel = self.tell

    def start(self) -> None:
        if self.simulated.attention is not None:
            known_s = self.simulated.settings.mesh.lease_s, SEEN_AFTER_S + self.simulated.cluster.hop_s
            self.workers = AttentionWorkers(self.simulated.attention, self.clock, self.network, *known_s)
            self.pool_of |= dict.fromkeys(map(InstanceId, self.workers.names), self.workers.pool.config.name)
        self.staff.begin()
        self.schedulers.start()

    @property
    def lives(self) -> list[SimulatedInstance]:
        """All that ever were, in the order in which they ended, then began."""
        return [*self.former, *self.instances.values()]

    def is_alive(self, life: InstanceLife) -> bool:
        instance = self.instances.get(life.instance_id)
        return instance is not None and instance.life == life

    def find(self, instance_id: InstanceId) -> SimulatedInstance | None:
        return self.instances.get(instance_id)

    def life_of(self, instance_id: InstanceId) -> InstanceLife:
        return self.instances[instance_id].life

    def tell(self, instance_id: InstanceId, word: msgspec.Struct) -> None:
        def arrive() -> None:
            instance = self.instances.get(instance_id)
            if instance is not None:
                instance.take_word(word)

        self.network.tell(arrive)

    def members(self) -> tuple[MemberRecord, ...]:
        return (*(each.record for each in self.instances.values()), RECORD)

    def place_moved(self, call: PlaceMoved, answer: Callable[[Placement | RequestError], None]) -> None:
        self.network.tell(lambda: self.schedulers.place_moved(call, answer))

    def tell_everyone(self, gone: InstanceGone) -> None:
        def arrive() -> None:
            for instance in list(self.instances.values()):
                instance.take_word(gone)
            self.gateway.take_gone(gone)

        self.network.tell(arrive)

    def tell_scheduler(self, word: KVLinkFailed | KVLinkWorks) -> None:
        self.schedulers.tell_link(word)

    # reports

    def _note_change(self, instance_id: InstanceId) -> None:
        reporter = self._reporters[instance_id]
        due_s, now = reporter.newest_s + reporter.gap_s, self.clock.now
        if due_s < now:
            due_s = now
        if reporter.timer.action is None or reporter.timer.due_s > due_s:
            self._report_at(reporter, due_s)

    def _report_at(self, reporter: _Reporter, due_s: float) -> None:
        reporter.timer.action = None
        reporter.timer = self.clock.at(due_s, reporter.report)

    def _report(self, reporter: _Reporter) -> None:
        instance, now = reporter.instance, self.clock.now
        if not instance.is_alive:
            return
        # What it computes is told in passing, and makes no further report.
        reporter.newest_s = now
        report = instance.load()
        if not reporter.conditions.silences:
            self.schedulers.tell_report(report)
        # As long as nothing changes an idle one's next reports would say the same.
        silence_s = reporter.idle_s if instance.is_idle else reporter.interval_s
        self._report_at(reporter, now + silence_s)

    # instances

    def is_there(self, name: InstanceId) -> bool:
        """An instance, or an attention worker."""
        return name in self.instances or (self.workers is not None and name in self.workers.states)

    def die(self, instance_id: InstanceId, *, is_for_good: bool, is_seen: bool) -> None:
        """Without a word to anybody. ``is_seen``: schedulers see that its process ends."""
        facts = {FOR_GOOD: is_for_good, "with its host": not is_seen}
        self.history.note("death", instance_id, ", ".join(name for name, holds in facts.items() if holds))
        if self._is_worker(instance_id):
            self._attention.die(instance_id, is_seen=is_seen)
            return
        instance = self.instances[instance_id]
        instance.has_died = True
        self._end(instance_id)
        if is_seen:
            self.clock.after(SEEN_AFTER_S, lambda: self.schedulers.tell_ended(instance.life))
        if is_for_good:
            self.staff.dismiss(instance_id)

    def _drain(self, instance_id: InstanceId) -> None:
        def end() -> None:
            self._report(self._reporters[instance_id])
            self._end(instance_id)

        self.instances[instance_id].drain(self.simulated.settings.mesh.drain_timeout_s, end)

    def _end(self, instance_id: InstanceId) -> None:
        """What it was sending or was sent does not arrive."""
        instance = self.instances[instance_id]
        instance.end()
        instance.ended_s = self.clock.now
        del self.instances[instance_id]
        self.former.append(instance)
        self.clock.cancel(self._reporters.pop(instance_id).timer)
        self.network.end(instance_id)
        for other in self.instances.values():
            other.decode.note_ended(instance.life)
        self.staff.note_ended(instance_id)

    def begin_anew(self, instance_id: InstanceId) -> None:
        """The next life of one that died, if it is still wanted."""
        pool = self.staff.wanted.get(instance_id)
        if self._is_worker(instance_id):
            self._attention.join(instance_id)
            self.history.note("return", instance_id)
        elif pool is not None:
            self._join(pool, instance_id)
            self.history.note("return", instance_id, self.instances[instance_id].role)

    def conditions_of(self, instance_id: InstanceId) -> Conditions:
        return self._conditions.setdefault(instance_id, Conditions())

    def apply_conditions(self, instance_id: InstanceId) -> None:
        """After they have changed."""
        instance, conditions = self.instances.get(instance_id), self.conditions_of(instance_id)
        if self._is_worker(instance_id):
            self._attention.fare(instance_id, conditions)
        if instance is not None:
            [pool] = [each for each in self.simulated.pools if each.config.name == self.pool_of[instance_id]]
            engine, speed = self._engine_of(pool, conditions), self._speed_of(pool, conditions)
            instance.change_speed(engine, speed)
            self.network.pace(instance_id, conditions.link_share)

    def _is_worker(self, name: InstanceId) -> bool:
        return self.workers is not None and name in self.workers.names

    @property
    def _attention(self) -> AttentionWorkers:
        assert self.workers is not None, "no workers for those who need them"
        return self.workers

    def _engine_of(self, pool: Pool, conditions: Conditions) -> EngineSettings:
        settings, performance = pool.settings.instance, pool.performance
        if conditions.slowness != 1:
            performance = SlowedPerformance(performance, conditions.slowness)
        shares = stage_shares(self.simulated.shape.layers, pool.config.pipeline)
        return EngineSettings(
            performance,
            settings.mixed_policy,
            _sizes(pool.settings)[0],
            settings.mixed_max_wait_s,
            shares,
            conditions.link_share,
        )

    def _speed_of(self, pool: Pool, conditions: Conditions) -> MeasuredSpeed:
        key = (pool.config.name, conditions.slowness)
        if key not in self._speeds:
            performance = self._engine_of(pool, conditions).performance
            self._speeds[key] = measured_speed_of(performance, *_sizes(pool.settings), pool.config.pipeline)
        return self._speeds[key]

    def _join(self, pool: Pool, instance_id: InstanceId) -> None:
        conditions = self.conditions_of(instance_id)
        speed = self._speed_of(pool, conditions)
        self._lives += 1
        simulated, config, cluster = self.simulated, pool.settings, self.simulated.cluster
        largest = pool.total_blocks if pool.remote is None else pool.remote.pool_blocks
        record = InstanceRecord(
            instance_id=instance_id,
            incarnation=Incarnation(f"life-{self._lives}"),
            role=pool.config.role,
            model=simulated.shape.name,
            host=instance_id,
            pid=1,
            http_url="",
            block_size=config.instance.block_size,
            total_blocks=pool.total_blocks,
            largest_pool_blocks=largest,
            context_length=largest * config.instance.block_size,
            dtype=f"{cluster.element_bytes}-byte",
            device=pool.config.device or pool.config.name,
            home=pool.config.role,
            chunk_time=speed.chunk_time,
            step_time=speed.step_time,
        )
        engine = self._engine_of(pool, conditions)

        paces_s = {name: each.tpot_s for name, each in config.service_classes.items()}
        others_s = config.objectives.tpot_s

        def tpot_s(service_class: str) -> float:
            return paces_s.get(service_class, others_s)

        remote = None
        if pool.remote is not None:
            remote = RemoteUse(pool.remote, self._attention)
        tally = self.tallies.get(pool.config.name)
        around = Surroundings(
            self,
            engine,
            speed,
            cluster.host_bytes_per_s,
            tpot_s,
            self.is_exact,
            asked_by(config.scheduler, are_rules_judged=False),
            remote,
            None if tally is None else tally.add,
        )
        states = states_of(simulated, pool, record)
        instance = SimulatedInstance(
            record,
            pool.config.role,
            *states,
            around,
            note_change=partial(self._note_change, instance_id),
            publish_load=lambda: self._report(self._reporters[instance_id]),
            began_s=self.clock.now,
        )
        self.instances[instance_id] = instance
        self.pool_of[instance_id] = pool.config.name
        self.network.add(instance_id, pool.config.link_bytes_per_s or cluster.link_bytes_per_s)
        nothing = self.clock.at(self.clock.now, lambda: None)
        gap_s, interval_s = config.instance.report_gap_s, config.instance.report_interval_s
        idle_s = max(interval_s, simulated.settings.mesh.lease_s / 3)
        reporter = _Reporter(instance, conditions, gap_s, interval_s, idle_s, nothing)
        reporter.report = partial(self._report, reporter)
        self._reporters[instance_id] = reporter
        if instance.pools is not None:
            instance.pools.look()
        self._report_at(reporter, self.clock.now)
        if conditions.link_share != 1:
            self.network.pace(instance_id, conditions.link_share)
        for told in self.on_join:
            told(instance)


def make_cluster(
    simulated: Simulated,
    *,
    is_exact: bool,
    retries: int = 0,
    timeline: SimulatedTimeline | None = None,
    has_operators: bool = False,
) -> Cluster:
    """``is_exact``: every request draws as many tokens as it may, and engines need not ask.
    ``has_operators``: what each took is counted."""
    clock, records, cluster = Clock(), Records(), simulated.cluster
    settings = simulated.settings
    links = Links(
        clock, cluster.link_latency_s, settings.transfer.deadline_s, settings.transfer.suspect_after_s
    )
    host = None if simulated.host is None else Host(simulated.host, clock)
    network = Network(clock, links, cluster.hop_s, timeline, host)
    losses, own = Losses(settings.mesh.lease_s), settings.gateway
    gateway = SimulatedGateway(
        network, records, own.max_continuations, losses, own.wait_for_instance_s, retries
    )
    tallies = _tallies_of(simulated.pools) if has_operators else {}
    return Cluster(simulated, clock, network, gateway, records, is_exact, tallies)


def _tallies_of(pools: Iterable[Pool]) -> dict[str, OperatorTally]:
    """Of those whose source of performance knows operators."""
    found = {}
    for pool in pools:
        model = pool.performance if pool.remote is None else pool.remote.cost.model
        if isinstance(model, OperatorTimes):
            found[pool.config.name] = OperatorTally(model, is_attending=pool.remote is None)
    return found


def _sizes(config: Config) -> tuple[int, int]:
    return config.instance.chunk_tokens or DEFAULT_CHUNK_TOKENS, config.instance.max_decode_batch
