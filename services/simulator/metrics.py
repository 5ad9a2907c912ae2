"""What a run came to: of requests (``common.latency`` defines), of the mesh as a whole, of each pool and of
each instance."""

import math
from collections.abc import Iterator

import msgspec

from common.ids import InstanceId
from common.latency import (
    REPORTED_PERCENTILES,
    Attainment,
    Distribution,
    RequestLatency,
    ServiceObjectives,
    describe,
    end_to_end_s,
    goodput_per_s,
    has_met,
    slo_attainment,
    tpot_s,
    ttft_s,
)
from services.simulator.attention_engine import AttentionEngine
from services.simulator.cluster import Cluster
from services.simulator.config import Pool
from services.simulator.gaps import GapCounts
from services.simulator.hardware import (
    HardwareMetrics,
    PoolDevices,
    PoolHardware,
    hardware_of,
    pool_hardware,
)
from services.simulator.history import MeshChange
from services.simulator.instance import SimulatedInstance
from services.simulator.instance_use import InstanceSummary, instance_uses, mean, use_of, within_s
from services.simulator.operator_metrics import STEPS_ATTENTION, OperatorMetrics
from services.simulator.records import OUTCOMES, Records
from services.simulator.refusal import Refusal

DONE = OUTCOMES.index("done")


class PoolMetrics(msgspec.Struct, frozen=True):
    """What all of the pool's instances did is as ``instance_use.Use`` has it. ``instances``: that ever were;
    ``mean_instances``: over the run, from when one was begun to be started until it has ended; ``deaths``: of
    theirs. ``hit_tokens``: of prompts, that were kept and not computed, as ``chunk_tokens`` were.
    ``link_out`` and ``link_in``: the share of what their links could have carried that KV took. Means:
    ``handover_wait_s`` from a computed prompt to the first portion of its KV asked for, ``admission_wait_s``
    from an offer to the batch."""

    name: str
    role: str
    instances: int
    mean_instances: float
    deaths: int
    busy: float
    prefill_busy: float
    chunk_tokens: int
    hit_tokens: int
    decode_steps: int
    batch: float
    kv_peak: float
    sent_bytes: int
    link_out: float
    link_in: float
    handover_wait_s: float
    admission_wait_s: float
    preempted: int
    swaps: int


class WorkerSummary(msgspec.Struct, frozen=True):
    """Of one attention worker, all its lives together. ``busy``: the share of the run's time."""

    name: str
    busy: float


class AttentionMetrics(msgspec.Struct, frozen=True):
    """Of attention workers and the decode instances over them; shares are of the run's time. ``busiest``: of
    one worker; ``by_worker``: of each. ``replicas_busy``: of the model replicas, on average.
    ``network_hidden``: the share of all exchanges' time, one after another, by which steps did not become
    longer. ``link_in``: of what the workers' links could have carried, that KV took. ``moves``: of sequences
    from one worker to another."""

    workers: int
    busy: float
    busiest: float
    replicas_busy: float
    network_s: float
    network_hidden: float
    link_in: float
    moves: int
    by_worker: tuple[WorkerSummary, ...]


class Metrics(msgspec.Struct, frozen=True):
    """``moved``: how often a sequence went on at another decode instance; ``asked_to_leave``: how often the
    scheduler asked one to leave an instance that would run out of memory. ``queue``: a prompt's, until its
    first chunk. ``tbt_s``: percentiles (``common.latency.REPORTED_PERCENTILES``) of all gaps between tokens,
    within 1 %. ``second_token``: from the first token to the second, the hand-over with it. ``elapsed_s``:
    from the first arrival to the last end. ``refusals``: of those rejected, ``failures`` of those that
    failed; ``continued_by``: how often a sequence broke and went on, by why. ``changes``: of the mesh, in
    their order; ``idle_faults``: by their numbers, those that befell nobody. ``operators``: where asked for,
    of pools whose source knows them. ``digest``: equal for equal runs."""

    requests: int
    done: int
    rejected: int
    refusals: tuple[Refusal, ...]
    failed: int
    failures: tuple[Refusal, ...]
    continued: int
    continued_by: dict[str, int]
    moved: int
    asked_to_leave: int
    elapsed_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft: Distribution | None
    tpot: Distribution | None
    end_to_end: Distribution | None
    queue: Distribution | None
    second_token: Distribution | None
    slowest_gap: Distribution | None
    tbt_s: tuple[float, ...]
    attainment: Attainment | None
    goodput_per_s: float | None
    pools: tuple[PoolMetrics, ...]
    instances: tuple[InstanceSummary, ...]
    attention: AttentionMetrics | None
    changes: tuple[MeshChange, ...]
    idle_faults: tuple[int, ...]
    hardware: HardwareMetrics
    operators: tuple[OperatorMetrics, ...]
    events: int
    digest: str


def measure(cluster: Cluster, objectives: ServiceObjectives | None = None) -> Metrics:
    """Of a run that is over. Without objectives nothing is said of attainment."""
    records = cluster.records
    done = [number for number in range(len(records)) if records.outcome[number] == DONE]
    latencies = [latency_of(records, number) for number in done]
    first_s, last_s = min(records.arrival_s, default=0.0), max(records.end_s, default=0.0)
    elapsed_s = last_s - first_s
    attainment = None
    met = None
    if objectives is not None:
        attainment = slo_attainment(latencies, len(records) - len(done), objectives)
        met = sum(has_met(each, objectives) for each in latencies)
    gaps = GapCounts()
    gaps.merge(cluster.gateway.first_gaps)
    for instance in cluster.lives:
        gaps.merge(instance.decode.drawing.gaps)
    tokens = sum(records.drawn_tokens)
    return Metrics(
        requests=len(records),
        done=len(done),
        rejected=sum(each == OUTCOMES.index("rejected") for each in records.outcome),
        refusals=tuple(cluster.gateway.refusals.values()),
        failed=sum(each == OUTCOMES.index("failed") for each in records.outcome),
        failures=tuple(cluster.gateway.failures.values()),
        continued=cluster.gateway.continuations,
        continued_by=dict(cluster.gateway.causes),
        moved=cluster.gateway.moves,
        asked_to_leave=cluster.schedulers.asked_to_leave,
        elapsed_s=elapsed_s,
        requests_per_s=len(done) / elapsed_s if elapsed_s > 0 else 0.0,
        tokens_per_s=tokens / elapsed_s if elapsed_s > 0 else 0.0,
        ttft=describe(each.ttft_s for each in latencies),
        tpot=describe(each.tpot_s for each in latencies if each.tpot_s is not None),
        end_to_end=describe(each.end_to_end_s for each in latencies),
        queue=describe(records.queue_s[number] for number in done),
        second_token=describe(_second_tokens(records, done)),
        slowest_gap=describe(each.slowest_gap_s for each in latencies if each.slowest_gap_s is not None),
        tbt_s=tuple(gaps.percentiles(REPORTED_PERCENTILES)),
        attainment=attainment,
        goodput_per_s=None if met is None or elapsed_s <= 0 else goodput_per_s(met, elapsed_s),
        pools=tuple(_pools(cluster, first_s, last_s)),
        instances=tuple(instance_uses(cluster, first_s, last_s)),
        attention=_attention(cluster, elapsed_s),
        changes=tuple(cluster.history.changes),
        idle_faults=tuple(number for number, times in cluster.history.befell.items() if not times),
        hardware=hardware_of(list(_hardware(cluster, first_s, last_s)), len(done), elapsed_s),
        operators=tuple(_operators(cluster)),
        events=cluster.clock.events,
        digest=records.digest(),
    )


def latency_of(records: Records, number: int) -> RequestLatency:
    """Of a request that is done."""
    arrival_s, end_s = records.arrival_s[number], records.end_s[number]
    first_s, slowest_s = records.first_token_s[number], records.slowest_gap_s[number]
    return RequestLatency(
        ttft_s=ttft_s(arrival_s, first_s),
        tpot_s=tpot_s(first_s, end_s, records.drawn_tokens[number]),
        slowest_gap_s=None if math.isnan(slowest_s) else slowest_s,
        end_to_end_s=end_to_end_s(arrival_s, end_s),
    )


def _second_tokens(records: Records, done: list[int]) -> Iterator[float]:
    for number in done:
        second_s = records.second_token_s[number]
        if not math.isnan(second_s):
            yield second_s - records.first_token_s[number]


def _members(cluster: Cluster, pool: Pool) -> list[SimulatedInstance]:
    name = pool.config.name
    return [each for each in cluster.lives if cluster.pool_of[each.instance_id] == name]


def _names(members: list[SimulatedInstance]) -> set[InstanceId]:
    return {each.instance_id for each in members}


def _mean_instances(cluster: Cluster, pool: Pool, first_s: float, last_s: float) -> float:
    terms = cluster.staff.terms_of(pool)
    if last_s <= first_s:
        return float(len(terms))
    there_s = (within_s(each.began_s, each.ended_s, first_s, last_s) for each in terms)
    return math.fsum(each_s / (last_s - first_s) for each_s in there_s)


def _hardware(cluster: Cluster, first_s: float, last_s: float) -> Iterator[PoolHardware]:
    simulated, elapsed_s = cluster.simulated, last_s - first_s
    for pool in simulated.pools:
        members = _members(cluster, pool)
        engines = [each.engine for each in members]
        work, busy_s = [each.work for each in engines], math.fsum(each.busy.all_s for each in engines)
        element_bytes = simulated.cluster.element_bytes
        instances = _mean_instances(cluster, pool, first_s, last_s)
        devices = PoolDevices.of(pool)
        yield pool_hardware(devices, simulated.shape, element_bytes, instances, work, busy_s, elapsed_s)
    workers = cluster.workers
    if workers is not None:
        config, use = workers.pool.config, workers.use
        devices = PoolDevices(config.name, workers.pool.device, config.devices)
        had = (config.count, [use.work], math.fsum(use.busy_s.values()), elapsed_s)
        yield pool_hardware(devices, simulated.shape, element_bytes, *had)


def _attention(cluster: Cluster, elapsed_s: float) -> AttentionMetrics | None:
    workers = cluster.workers
    if workers is None or elapsed_s <= 0:
        return None
    busy_s, users = workers.use.busy_s, [each for each in cluster.lives if each.pools is not None]
    engines = [each.engine for each in users if isinstance(each.engine, AttentionEngine)]
    sent_s = math.fsum(each.network.sent_s for each in engines)
    exposed_s = math.fsum(each.network.exposed_s for each in engines)
    return AttentionMetrics(
        workers=workers.pool.config.count,
        busy=math.fsum(busy_s.values()) / (elapsed_s * workers.pool.config.count),
        busiest=max(busy_s.values(), default=0.0) / elapsed_s,
        replicas_busy=mean(math.fsum(each.busy.decode_s for each in engines), len(engines)) / elapsed_s,
        network_s=sent_s,
        network_hidden=1.0 - exposed_s / sent_s if sent_s > 0 else 0.0,
        link_in=cluster.network.use_of(
            [InstanceId(name) for name in workers.names], elapsed_s * workers.pool.config.count
        ).inward,
        moves=sum(each.decode.moves for each in users),
        by_worker=tuple(WorkerSummary(name, busy_s.get(name, 0.0) / elapsed_s) for name in workers.names),
    )


def _operators(cluster: Cluster) -> Iterator[OperatorMetrics]:
    """Attention on workers is what they were busy with."""
    for pool, tally in cluster.tallies.items():
        yield from tally.metrics(pool)
    workers = cluster.workers
    if workers is not None and cluster.tallies:
        steps = sum(each.engine.work.passes for each in cluster.lives if each.pools is not None)
        seconds, attended = math.fsum(workers.use.busy_s.values()), workers.use.work.pairs
        tokens = mean(attended, steps)
        yield OperatorMetrics(workers.pool.config.name, STEPS_ATTENTION, steps, tokens, seconds, 1.0)


def _pools(cluster: Cluster, first_s: float, last_s: float) -> Iterator[PoolMetrics]:
    for pool in cluster.simulated.pools:
        members = _members(cluster, pool)
        use, names = use_of(members, first_s, last_s), _names(members)
        instances = _mean_instances(cluster, pool, first_s, last_s)
        there_s = math.fsum(within_s(each.began_s, each.ended_s, first_s, last_s) for each in members)
        links = cluster.network.use_of(names, there_s)
        yield PoolMetrics(
            name=pool.config.name,
            role=pool.config.role,
            instances=len(names),
            mean_instances=instances,
            deaths=sum(each.has_died for each in members),
            busy=use.busy,
            prefill_busy=use.prefill_busy,
            chunk_tokens=use.chunk_tokens,
            hit_tokens=sum(each.prefill.hit_tokens for each in members),
            decode_steps=use.decode_steps,
            batch=use.batch,
            kv_peak=use.kv_peak,
            sent_bytes=sum(each.prefill.sent_bytes for each in members),
            link_out=links.outward,
            link_in=links.inward,
            handover_wait_s=mean(
                math.fsum(each.prefill.handover_wait_s for each in members),
                sum(each.prefill.handovers for each in members),
            ),
            admission_wait_s=mean(
                math.fsum(each.decode.admission_wait_s for each in members),
                sum(each.decode.admissions for each in members),
            ),
            preempted=use.preempted,
            swaps=sum(each.decode_state.swapping.swaps for each in members),
        )
