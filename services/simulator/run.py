"""Runs requests through a simulated mesh to their end, and holds the run to what must be conserved."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from common.errors import ConfigError, ServiceError
from common.messages import has_phase
from common.phases import missing_phases
from services.bench.arrivals import POISSON_BURSTINESS, make_arrivals
from services.bench.traces import Trace
from services.simulator.cluster import Cluster, make_cluster
from services.simulator.config import Simulated
from services.simulator.gateway import Entry
from services.simulator.instance import SimulatedInstance
from services.simulator.life import begin_life
from services.simulator.records import request_id_of
from services.simulator.shape import attended_tokens
from services.simulator.timeline import SimulatedTimeline

LEAST_RATE_PER_S = 1e-3
"""With fewer requests hardly anything but idling would be simulated."""
LONGEST_S = 1e6
"""Some minutes' work: everybody's reports and looks go on where nobody comes."""
LITTLE_TOLERANCE = 1e-6
SETTLE_S = 120.0
"""Virtual seconds after the last client is gone until nobody holds anything any more, at the most."""
STUCK_S = 86_400.0
"""Where nobody has ended for so long, after the last arrival, those that are left never will."""
MESSAGES = 10
"""That a request waits for one after another, with those of instances about its KV."""
NAMED = 5
"""Requests of which it is said what they waited for."""
PROGRESS_REQUESTS = 256
PROGRESS_S = 3600.0
"""Virtual seconds between two tellings where hardly anybody comes."""
COLLECTED_EVERY = 20_000
"""Objects that were made and not freed between two looks for cycles, of which a run hardly makes any."""


class SimulationError(ServiceError):
    """What must be conserved was not, or requests never end: a defect of the simulator, or of what it
    drives."""


@dataclass(frozen=True, slots=True)
class Offered:
    """One request that comes. ``block_hashes``: of what its prompt begins with, if the trace says so."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered. ``max_tokens``: that every client allows; None: just what it is going to draw, as
    ``lamella bench`` asks for. ``retries``: how often a client that is refused asks again."""

    requests: Iterable[Offered]
    max_tokens: int | None = None
    retries: int = 0


def offered_of(
    trace: Trace,
    rate_per_s: float | None,
    arrivals: str,
    seed: int,
    trace_scale: float = 1.0,
    burstiness: float = POISSON_BURSTINESS,
) -> Iterator[Offered]:
    """At their own times, ``trace_scale`` times as fast, or at a rate. Without either there is
    ConfigError of ``make_arrivals``."""
    rows = trace.requests
    if rate_per_s is None and trace.has_arrivals:
        times: Iterable[float] = ((row.arrival_s or 0.0) / trace_scale for row in rows)
    else:
        times = make_arrivals(arrivals, rate_per_s or 0.0, seed, burstiness)
    for row, time_s in zip(rows, islice(times, len(rows)), strict=True):
        yield Offered(time_s, row.prompt_tokens, row.output_tokens, row.block_hashes)


def check_rate(rate_per_s: float) -> None:
    """Raises ConfigError."""
    if not LEAST_RATE_PER_S <= rate_per_s < float("inf"):
        rule = f"must be a number of requests per second, at least {LEAST_RATE_PER_S:g}"
        raise ConfigError("--rate", rate_per_s, rule)


def check_span(trace_scale: float, trace: Trace) -> None:
    """Of arrivals at their own times: virtual time without requests takes time, too. Raises ConfigError."""
    rows = trace.requests
    span_s = ((rows[-1].arrival_s or 0.0) - (rows[0].arrival_s or 0.0)) / trace_scale
    most_s = max(LONGEST_S, len(rows) / LEAST_RATE_PER_S)
    if span_s > most_s:
        rule = (
            f"spreads the trace's {len(rows):,} requests over {span_s:.4g} s, where {most_s:,.0f} s can be"
            f" simulated: must be at least {trace_scale * span_s / most_s:.4g}"
        )
        raise ConfigError("--trace-scale", trace_scale, rule)


def simulate(
    simulated: Simulated,
    load: Load,
    progress: Callable[[int, float], None] = lambda _, __: None,
    timeline: SimulatedTimeline | None = None,
    seed: int = 0,
    watch: Callable[[Cluster], None] = lambda _: None,
    *,
    has_operators: bool = False,
) -> Cluster:
    """The mesh after the last request. ``progress`` is told how many have come by what virtual time;
    ``timeline`` keeps what everyone did; ``seed``: of what befalls the mesh; ``watch`` is shown the mesh as
    often as some requests have come, and ends the run by what it raises; ``has_operators``: what each took is
    counted. Raises SimulationError, or ConfigError for a mesh in which requests would wait for ever."""
    cluster = make_cluster(
        simulated,
        is_exact=load.max_tokens is None,
        retries=load.retries,
        timeline=timeline,
        has_operators=has_operators,
    )
    cluster.start()
    prefixes = begin_life(cluster, seed)
    requests = iter(load.requests)
    clock, gateway = cluster.clock, cluster.gateway
    is_everybody_here = False

    def tell() -> None:
        progress(len(cluster.records), clock.now)

    def come(offered: Offered) -> None:
        gateway.start(offered.prompt_tokens, offered.output_tokens, load.max_tokens)
        if prefixes is not None and offered.block_hashes:
            newest = request_id_of(len(cluster.records) - 1)
            prefixes.note(newest, offered.block_hashes, gateway.entries)
        if len(cluster.records) % PROGRESS_REQUESTS == 0:
            tell()
            watch(cluster)
        expect()

    def expect() -> None:
        nonlocal is_everybody_here
        offered = next(requests, None)
        if offered is None:
            is_everybody_here = True
            clock.halt()
        else:
            clock.at(offered.arrival_s, lambda: come(offered))

    with _collecting_rarely():
        expect()
        while not is_everybody_here:
            clock.run_until(clock.now + PROGRESS_S)
            tell()
        waiting, stuck_s = len(gateway.entries), clock.now + STUCK_S
        while gateway.entries and clock.now < stuck_s:
            clock.run_until(min(clock.now + PROGRESS_S, stuck_s), lambda: not gateway.entries)
            if len(gateway.entries) < waiting:
                waiting, stuck_s = len(gateway.entries), clock.now + STUCK_S
            tell()
        clock.run_until(clock.now + SETTLE_S, lambda: _is_settled(cluster))
    check_conserved(cluster)
    return cluster


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _is_settled(cluster: Cluster) -> bool:
    cluster.schedulers.open_mail()
    return not cluster.schedulers.most_booked and all(each.is_idle for each in cluster.instances.values())


def check_conserved(cluster: Cluster) -> None:
    """After a run: requests in are requests out, nobody holds anything, time went forward, and Little's law
    holds, which here is an identity. Raises SimulationError, or ConfigError for faults that leave nobody."""
    records, gateway = cluster.records, cluster.gateway
    _check_ended(cluster)
    if not _is_settled(cluster):
        _check_hops(cluster, SETTLE_S, f"the mesh was not at rest {SETTLE_S:,g} s after the last request")
    if 0 in records.outcome:
        raise SimulationError("a request is neither done nor refused")
    if cluster.schedulers.most_booked:
        raise SimulationError(f"a scheduler keeps {cluster.schedulers.most_booked} bookings")
    for instance in cluster.instances.values():
        if not instance.is_idle:
            raise SimulationError(f"{instance.instance_id} is not idle")
    for instance in cluster.lives:
        # One that died, or whose drain had to end, had more to do.
        if instance.is_idle and not instance.has_died:
            _check_empty(instance)
    _check_workers(cluster)
    _check_times(cluster)
    sojourn_s = math.fsum(
        end_s - arrival_s for end_s, arrival_s in zip(records.end_s, records.arrival_s, strict=True)
    )
    if not math.isclose(sojourn_s, gateway.waiting_s, rel_tol=LITTLE_TOLERANCE, abs_tol=1e-6):
        raise SimulationError(
            f"Little's law is broken: requests were there for {sojourn_s} s in sum, and"
            f" {gateway.waiting_s} s were counted"
        )


def _check_empty(instance: SimulatedInstance) -> None:
    name, blocks = instance.instance_id, instance.blocks
    if blocks.free_blocks != blocks.total_blocks:
        raise SimulationError(f"{name} keeps {blocks.total_blocks - blocks.free_blocks} blocks")
    if instance.decode_state.swapping.host.used_blocks:
        raise SimulationError(f"{name} keeps blocks of its host's memory")


def _check_ended(cluster: Cluster) -> None:
    waiting = list(cluster.gateway.entries)
    if not waiting:
        return
    missing: list[str] = [*missing_phases(each.role for each in cluster.instances.values())]
    if cluster.workers is not None and not cluster.workers.states:
        missing.append("attention")
    if missing:
        rule = f"leaves nobody for good, so that {len(waiting)} requests wait for ever"
        raise ConfigError("fault", f"death of all for {' and '.join(missing)}", rule)
    found = (
        f"{len(waiting)} of {len(cluster.records)} requests had not ended, and none had for {STUCK_S:,g} s"
    )
    _check_hops(cluster, STUCK_S, found)
    _check_links(cluster, found)
    named = [f"{each} waited {_wait_of(cluster.gateway.entries[each])}" for each in waiting[:NAMED]]
    raise SimulationError(f"{found}: {', '.join(named)}{', …' if len(waiting) > NAMED else ''}")


def _wait_of(entry: Entry) -> str:
    placement = entry.placement
    if placement is None:
        return "to be placed"
    if entry.drawn == 0:
        return f"for its first token of {placement.prefill_instance}"
    return f"for the rest of its {entry.length} tokens of {placement.decode_instance}"


def _check_hops(cluster: Cluster, patience_s: float, found: str) -> None:
    """Raises ConfigError where messages alone take as long."""
    hop_s = cluster.network.hop_s
    if hop_s * MESSAGES >= patience_s:
        rule = f"must be under {patience_s / MESSAGES:,g} s: {found}"
        raise ConfigError("cluster.hop_s", hop_s, rule)


def _check_links(cluster: Cluster, found: str) -> None:
    """Raises ConfigError where to move the KV of one of those that wait takes as long."""
    tokens, passed = 0, set[str]()
    for entry in cluster.gateway.entries.values():
        placement = entry.placement
        if placement is None or not entry.drawn or placement.prefill_instance == placement.decode_instance:
            continue
        tokens = max(tokens, len(entry.request.prompt_ids))
        for instance_id in (placement.prefill_instance, placement.decode_instance):
            passed.add(cluster.pool_of[instance_id])
    if not passed:
        return
    simulated = cluster.simulated
    latency_s, nbytes = simulated.cluster.link_latency_s, tokens * simulated.kv_token_bytes
    if latency_s >= STUCK_S:
        raise ConfigError("cluster.link_latency_s", latency_s, f"must be under {STUCK_S:,g} s: {found}")
    for pool in simulated.pools:
        if pool.config.name not in passed:
            continue
        own = pool.config.link_bytes_per_s
        key = "cluster" if own is None else f"pool.{pool.config.name}"
        bytes_per_s = own or simulated.cluster.link_bytes_per_s
        if nbytes / bytes_per_s >= STUCK_S:
            rule = f"takes {nbytes / bytes_per_s:,.0f} s for the {nbytes:,} bytes of a prompt's KV: {found}"
            raise ConfigError(f"{key}.link_bytes_per_s", bytes_per_s, rule)


def _check_workers(cluster: Cluster) -> None:
    """Whatever was attended to some worker has read, once."""
    workers, records = cluster.workers, cluster.records
    if workers is None:
        return
    workers.check()
    decoding = [each for each in cluster.instances.values() if has_phase(each.record.role, "decode")]
    is_plain = all(each.pools is not None and not each.decode_state.preempted for each in decoding)
    if not is_plain or cluster.gateway.continuations or sum(records.attempts) != len(records):
        return
    attended = 0
    for prompt, drawn in zip(records.prompt_tokens, records.drawn_tokens, strict=True):
        attended += attended_tokens(1, prompt + 1, drawn - 1) if drawn else 0
    if workers.use.work.pairs != attended:
        raise SimulationError(f"workers read {workers.use.work.pairs} tokens, where {attended} were needed")


def _check_times(cluster: Cluster) -> None:
    records = cluster.records
    for number in range(len(records)):
        times = (
            records.arrival_s[number],
            records.first_token_s[number],
            records.second_token_s[number],
            records.end_s[number],
        )
        known = [time_s for time_s in times if not math.isnan(time_s)]
        if known != sorted(known) or records.queue_s[number] < 0:
            raise SimulationError(f"request {number} went back in time: {times}")
        if records.outcome[number] == 1 and records.drawn_tokens[number] < 1:
            raise SimulationError(f"request {number} is done without a token")
