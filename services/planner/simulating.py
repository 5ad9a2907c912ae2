"""Carries a probe out: a configuration for the simulator, a run, and what came of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from common.config import InstanceConfig
from common.devices import DEVICES, Catalogue
from common.errors import ConfigError
from common.latency import Attainment, Distribution, ServiceObjectives, percentiles
from common.shapes import ModelShape
from services.bench.arrivals import POISSON_BURSTINESS, make_arrivals
from services.bench.traces import TraceRequest
from services.planner.attention_kinds import instance_settings, pool_table, worker_settings
from services.planner.bounds import Speed
from services.planner.candidates import MEMORY_SHARE, InstanceKind, PoolPlan
from services.planner.hopeless import Hopeless, end_hopeless
from services.planner.probes import Phase, Point, PoolPoint, Probe
from services.planner.sources import own_digest
from services.planner.workload import spaced
from services.simulator import slowdowns
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.devices import device_table
from services.simulator.metrics import Metrics, PoolMetrics, measure
from services.simulator.records import Records
from services.simulator.run import Load, Offered, simulate

UNBOUNDED_LINK = 1e15
UNBOUNDED_BLOCKS = 1 << 17
"""Of KV: more than all who are ever there at once fill."""
NO_TIME = {"kind": "linear"}
SLOWDOWN_RANKS = (50.0, 90.0, 99.0)
CHANCE = 3.0
"""Standard deviations of a Poisson count."""
FEWEST = 20.0
"""Requests: a queue that comes and goes leaves as many."""
LEFT_LYING = 0.02
"""Of what comes: less than that is taken for chance, too."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all probes of a plan have in common. ``burstiness``: of arrivals (``services.bench.arrivals``).
    ``performance``: a source's table by the name of the device; others have the roofline's;
    ``performance_digest``: of what the files hold that these name. ``settings``: sections of a mesh's
    settings. ``reference``: whom requests are compared with as if each were alone there (Splitwise's SLOs).
    ``goal``: where a run cannot reach that attainment any more it ends; None: none does. ``catalogue``: of
    all devices that may be used."""

    shape: ModelShape
    rows: tuple[TraceRequest, ...]
    objectives: ServiceObjectives
    element_bytes: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    performance: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    performance_digest: str = ""
    seed: int = 0
    burstiness: float = POISSON_BURSTINESS
    goal: float | None = None
    reference: InstanceKind | None = None
    catalogue: Catalogue = field(default_factory=lambda: DEVICES)

    def encoded(self) -> bytes:
        """All that a point hangs on beside its probe: the code and what files hold, too."""
        return msgspec.json.encode(
            (
                self.objectives,
                self.shape,
                self.element_bytes,
                dict(self.settings),
                dict(self.performance),
                self.performance_digest,
                self.seed,
                self.burstiness,
                self.goal,
                self.reference,
                [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in self.rows],
                list(self.catalogue.values()),
                own_digest(),
            )
        )


def speed_of(kind: InstanceKind, conditions: Conditions) -> Speed:
    """Raises ConfigError, PerformanceFileError."""
    try:
        (pool,) = simulated_of((PoolPlan(kind=kind, count=1),), conditions).pools
    except ConfigError as exc:
        # Pools are the planner's own; what was given are performances by device.
        of_pool, of_performance, field = exc.key.partition(".performance.")
        if of_performance and of_pool.startswith("pool."):
            raise ConfigError(f"performance.{kind.device}.{field}", exc.value, exc.rule) from exc
        raise
    return Speed(pool.performance, pool.total_blocks * pool.settings.instance.block_size)


def simulated_of(pools: Sequence[PoolPlan], conditions: Conditions, phase: Phase = "whole") -> Simulated:
    return simulated_from_tree(tree_of(pools, conditions, phase))


def tree_of(pools: Sequence[PoolPlan], conditions: Conditions, phase: Phase = "whole") -> dict[str, Any]:
    """As a file for ``lamella simulate`` has it."""
    tables = [
        _pool_table(f"{number}-{each.kind.role}", each, conditions) for number, each in enumerate(pools)
    ]
    settings = dict(conditions.settings)
    for number, each in enumerate(pools):
        if each.kind.attention_device is not None:
            device = conditions.catalogue[each.kind.attention_device]
            workers = each.count * each.kind.attention_workers
            performance = performance_of(device.name, conditions)
            tables.append(pool_table(f"{number}-attention", workers, device, performance))
            settings["attention"] = attention_settings(each, conditions)
    if phase == "prefill":
        tables.append(_timeless("decode", conditions))
    elif phase == "decode":
        tables.append(_timeless("prefill", conditions))
    cluster = {
        "shape": msgspec.to_builtins(conditions.shape),
        "element_bytes": conditions.element_bytes,
        "memory_share": MEMORY_SHARE,
    }
    named = {device for each in pools for device, _ in each.kind.parts if device not in DEVICES}
    own = [device_table(conditions.catalogue[name]) for name in sorted(named)]
    return {**settings, "cluster": cluster, **({"device": own} if own else {}), "pool": tables}


def attention_settings(pool: PoolPlan, conditions: Conditions) -> dict[str, Any]:
    """``[attention]`` of all, where a pool's instances have attention workers."""
    return {
        **conditions.settings.get("attention", {}),
        **worker_settings(
            pool.kind, pool.count, conditions.shape, conditions.element_bytes, conditions.settings
        ),
    }


def performance_of(device: str, conditions: Conditions) -> dict[str, Any]:
    return conditions.performance.get(device, {"kind": "roofline"})


def _pool_table(name: str, pool: PoolPlan, conditions: Conditions) -> dict[str, Any]:
    kind = pool.kind
    link = pool.link_bytes_per_s or kind.own_devices * conditions.catalogue[kind.device].network_bytes_s
    instance = kind.settings
    if kind.attention_workers:
        instance |= instance_settings(kind, pool.count, conditions.shape)
    return {
        "name": name,
        "role": kind.role,
        "count": pool.count,
        "device": kind.device,
        "devices": kind.tensor,
        "pipeline": kind.pipeline,
        "is_pipeline_on_network": kind.nodes > 1,
        "link_bytes_per_s": link,
        "instance": instance,
        "performance": performance_of(kind.device, conditions),
    }


def _timeless(role: str, conditions: Conditions) -> dict[str, Any]:
    """The other phase, which nobody waits for."""
    instance = conditions.settings.get("instance", {})
    block_tokens = instance.get("block_size", InstanceConfig().block_size)
    return {
        "name": "other",
        "role": role,
        "count": 1,
        "kv_tokens": UNBOUNDED_BLOCKS * block_tokens,
        "link_bytes_per_s": UNBOUNDED_LINK,
        "performance": NO_TIME,
    }


def run_probe(probe: Probe, conditions: Conditions) -> Point:
    """Raises SimulationError."""
    simulated = simulated_of(probe.pools, conditions, probe.phase)
    objectives = objectives_of(probe.phase, conditions.objectives)
    requests = min(probe.requests, len(conditions.rows))
    try:
        cluster = simulate(
            simulated,
            Load(offered_of(probe, conditions)),
            watch=lambda cluster: end_hopeless(cluster, objectives, conditions.goal, requests),
        )
    except Hopeless as end:
        return end.point
    metrics = measure(cluster, objectives)
    point = point_of(cluster, metrics, len(probe.pools))
    if conditions.reference is None:
        return point
    return msgspec.structs.replace(point, slowdowns=slowdowns_of(cluster.records, conditions))


def offered_of(probe: Probe, conditions: Conditions) -> Iterable[Offered]:
    rows = spaced(conditions.rows, probe.requests)
    arrivals = make_arrivals("poisson", probe.rate_per_s, conditions.seed, conditions.burstiness)
    for row, arrival_s in zip(rows, arrivals, strict=False):
        output = 1 if probe.phase == "prefill" else row.output_tokens
        yield Offered(arrival_s, row.prompt_tokens, output)


def objectives_of(phase: Phase, objectives: ServiceObjectives) -> ServiceObjectives:
    """Those that the phase alone can keep or miss."""
    if phase == "prefill":
        return ServiceObjectives(ttft_s=objectives.ttft_s)
    if phase == "decode":
        return ServiceObjectives(tpot_s=objectives.tpot_s, tbt_s=objectives.tbt_s)
    return objectives


def point_of(cluster: Cluster, metrics: Metrics, pools: int) -> Point:
    """``pools``: so many of the first are the deployment's own."""
    met = metrics.attainment or Attainment(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Point(
        attainment=met.share,
        ttft_share=met.ttft_share,
        tpot_share=met.tpot_share,
        other_share=min(met.tbt_share, met.end_to_end_share),
        done_share=metrics.done / max(1, metrics.requests),
        ttft_s=_percentiles(metrics.ttft),
        tpot_s=_percentiles(metrics.tpot),
        end_to_end_s=_percentiles(metrics.end_to_end),
        tbt_s=metrics.tbt_s,
        queue_p99_s=None if metrics.queue is None else metrics.queue.p99_s,
        slowdowns=(),
        left_share=left_share(cluster.records),
        mean_w=metrics.hardware.mean_w,
        pools=tuple(
            PoolPoint(each.busy, each.batch, each.kv_peak, each.preempted, _attention_busy(each, metrics))
            for each in metrics.pools[:pools]
        ),
    )


def _attention_busy(pool: PoolMetrics, metrics: Metrics) -> float:
    if metrics.attention is None or pool.role != "decode":
        return 0.0
    return metrics.attention.busy


def _percentiles(found: Distribution | None) -> tuple[float, ...]:
    return () if found is None else (found.p50_s, found.p90_s, found.p99_s)


def slowdowns_of(records: Records, conditions: Conditions) -> tuple[float, ...]:
    """As ``Point`` has them; none where no request has ended, and of gaps none where nobody has two
    tokens."""
    if conditions.reference is None:
        return ()
    kind = conditions.reference
    chunk_tokens = kind.chunk_tokens if kind.prefill_batching == "chunks" else None
    found = slowdowns.slowdowns_of(records, speed_of(kind, conditions).performance, chunk_tokens)
    return tuple(value for each in found for value in percentiles(each or [1.0], SLOWDOWN_RANKS))


def left_share(records: Records) -> float:
    """As ``Point`` has it: who was there in the last quarter of arrivals, less who was in the second, of
    those who came in between."""
    count = len(records)
    if count < 8:
        return 0.0
    columns = records.columns()
    there = np.arange(count) - np.searchsorted(np.sort(columns["end_s"]), columns["arrival_s"])
    before, after = (float(there[part * count // 4 : (part + 1) * count // 4].mean()) for part in (1, 3))
    come = count / 2
    chance = max(FEWEST, CHANCE * math.sqrt(max(1.0, before))) / come
    return (after - before) / come - max(LEFT_LYING, chance)
