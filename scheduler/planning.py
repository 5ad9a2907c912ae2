"""How many workers there should be: what the scheduler sees of requests and load reports, made into a plan.

Between windows arrivals, ends and looks at the mesh are only counted. At a window's end the profiled workload
and what instances have learned of their speed say what each service needs
(``scheduler.policy.worker_counts``), and each service's scaler when it follows
(``scheduler.policy.scaling``). Sans-IO, like all decisions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from common.config import Config
from common.messages import has_phase
from common.performance import DEFAULT_CHUNK_TOKENS, FittedTime
from common.scaling import ScaledService, ServiceCount
from scheduler.policy.scaling import LATE_SHARE, TRUSTED_ERROR, Asked, ServiceScaler
from scheduler.policy.worker_counts import (
    Bounds,
    Need,
    attention_need,
    chunks_of,
    decode_need,
    gateway_need,
    mean_fit,
    mixed_need,
    prefill_need,
    steps_of,
)
from scheduler.policy.workload import Workload, WorkloadProfiler
from scheduler.views import InstanceView

LOOKS_PER_WINDOW = 20
NOTHING_KNOWN = "no instance has learned yet how long its work takes, or no request has ended"


@dataclass(frozen=True, slots=True)
class MeshSight:
    """At one moment. ``late``: services whose objectives are being missed; one request alone, which more
    workers would not make faster, is never late. ``capacity_tokens``: KV of a decode instance, the mean, as
    ``chunk_tokens`` is of those that prefill."""

    workers: Mapping[ScaledService, int]
    open_requests: int
    late: frozenset[ScaledService]
    capacity_tokens: float
    chunk_time: FittedTime | None
    step_time: FittedTime | None
    chunk_tokens: float = DEFAULT_CHUNK_TOKENS


def look_at(
    instances: Iterable[InstanceView],
    gateways: int,
    attention_workers: int,
    open_requests: int,
    ttft_s: float,
    tpot_s: float,
    waiting_tokens: int = 0,
) -> MeshSight:
    """Of the instances that are ready, by home role: what a role policy changes for a while is no worker more
    or less. ``waiting_tokens``: of prompts that wait at the scheduler for them."""
    ready = [each for each in instances if each.is_ready]
    workers: Counter[ScaledService] = Counter({"gateway": gateways, "attention": attention_workers})
    workers.update(each.home for each in ready)
    reports = [each.report for each in ready if each.report is not None]
    is_mixed = not (workers["prefill"] or workers["decode"])
    late: set[ScaledService] = set()
    share = waiting_tokens / max(1, sum(has_phase(report.role, "prefill") for report in reports))
    for report in reports:
        queued = report.pending_prefill_tokens + share * has_phase(report.role, "prefill")
        wait_s = queued / (report.prefill_tokens_per_s or float("inf"))
        is_slow = report.decode_running > 1 and (report.decode_step_s or 0.0) > tpot_s
        has_queue = report.pending_prefill_requests > 1 or share > 0
        if has_queue and wait_s > ttft_s:
            late.add("mixed" if is_mixed else "prefill")
        if is_slow or report.decode_unadmitted:
            late.add("mixed" if is_mixed else "decode")
    chunks = [each.chunk_tokens for each in reports if has_phase(each.role, "prefill")]
    decoding = [each.capacity_tokens for each in ready if each.role != "prefill"]
    return MeshSight(
        workers=dict(workers),
        open_requests=open_requests,
        late=frozenset(late),
        capacity_tokens=sum(decoding) / len(decoding) if decoding else 0.0,
        chunk_time=mean_fit([each.chunk_time for each in ready if each.chunk_time is not None]),
        step_time=mean_fit([each.step_time for each in ready if each.step_time is not None]),
        chunk_tokens=sum(chunks) / len(chunks) if chunks else DEFAULT_CHUNK_TOKENS,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """``changed``: what of the workload has changed since the window before."""

    counts: tuple[ServiceCount, ...]
    workload: Workload
    changed: tuple[str, ...]


@dataclass(slots=True)
class Planner:
    """One scheduler's. ``began_s``: when it began to listen, by the clock of all later times."""

    config: Config
    began_s: float
    profiler: WorkloadProfiler = field(init=False)
    scalers: dict[ScaledService, ServiceScaler] = field(init=False)
    _known: set[ScaledService] = field(default_factory=set)
    _looks: int = 0
    _late: Counter[ScaledService] = field(default_factory=Counter)
    _chunk_time: FittedTime | None = None
    _step_time: FittedTime | None = None
    _capacity_tokens: float = 0.0

    def __post_init__(self) -> None:
        settings = self.config.scaling
        self.profiler = WorkloadProfiler(self.began_s)
        self.scalers = {
            service: ServiceScaler(
                settings, getattr(settings, f"min_{service}"), getattr(settings, f"max_{service}")
            )
            for service in get_args(ScaledService)
        }

    def look(self, sight: MeshSight) -> None:
        """Some times a window."""
        self._looks += 1
        self._late.update(sight.late)
        self._chunk_time = sight.chunk_time or self._chunk_time
        self._step_time = sight.step_time or self._step_time
        self._capacity_tokens = sight.capacity_tokens or self._capacity_tokens

    def plan(self, sight: MeshSight, now: float) -> Plan:
        """Ends the window. To be called at times that rise. Services that were never there are not planned:
        they are still starting, or the mesh is of another kind."""
        self.look(sight)
        changed = self.profiler.close(now)
        workload = self.profiler.workload
        assert workload is not None, "a window has ended"
        if set(changed) - {"rate"}:
            for scaler in self.scalers.values():
                scaler.forget_law()
        self._known.update(service for service, count in sight.workers.items() if count)
        counts = tuple(
            self._count(service, sight, workload, bool(changed), now)
            for service in self._services(sight)
            if service in self._known
        )
        self._looks = 0
        self._late.clear()
        return Plan(counts, workload, changed)

    def _services(self, sight: MeshSight) -> list[ScaledService]:
        """Those that the mesh has: of one that does both, no halves are wanted."""
        present = sight.workers
        halves = present.get("prefill", 0) + present.get("decode", 0)
        is_mixed = present.get("mixed", 0) > 0 and not halves
        found: list[ScaledService] = ["gateway"]
        found += ["mixed"] if is_mixed else ["prefill", "decode"]
        if self._scales_attention(sight):
            found.append("attention")
        return found

    def _scales_attention(self, sight: MeshSight) -> bool:
        """Workers that hold some KV heads of every sequence are as many as they are."""
        is_whole = self.config.instance.attention_partition == "requests"
        return sight.workers.get("attention", 0) > 0 and is_whole

    def _count(
        self, service: ScaledService, sight: MeshSight, workload: Workload, has_changed: bool, now: float
    ) -> ServiceCount:
        current, scaler = sight.workers.get(service, 0), self.scalers[service]
        workload = replace(workload, rate_per_s=workload.busy_rate_per_s)
        higher = replace(workload, rate_per_s=workload.rate_per_s * (1 + self.config.scaling.down_margin))
        need, need_higher = (self._need(service, sight, each) for each in (workload, higher))
        if need is None or need_higher is None:
            desired, reason = scaler.keep(current, NOTHING_KNOWN, now)
        else:
            asked = Asked(
                rate_per_s=workload.rate_per_s,
                need=need,
                need_higher=need_higher,
                was_missed=self._late[service] > LATE_SHARE * self._looks,
                has_changed=has_changed,
                is_sure=workload.relative_error <= TRUSTED_ERROR,
            )
            desired, reason = scaler.decide(current, asked, now)
        return ServiceCount(service, current, desired, reason)

    def _need(self, service: ScaledService, sight: MeshSight, workload: Workload) -> Need | None:
        """None while nobody has learned what this takes."""
        if not workload.rate_per_s:
            return Need(1, "no request comes")
        if not workload.prompts.count or not workload.outputs.count:
            return None
        bounds = self._bounds(sight)
        chunk_time, step_time = self._chunk_time, self._step_time
        chunks = None if chunk_time is None else chunks_of(workload, chunk_time, bounds.chunk_tokens)
        steps = None if step_time is None else steps_of(workload, step_time)
        if service == "gateway":
            return gateway_need(workload, sight.open_requests, bounds, self.config.gateway.max_open_requests)
        if service == "prefill" and chunks is not None:
            return prefill_need(workload, chunks, bounds)
        if service == "decode" and steps is not None:
            return decode_need(workload, steps, bounds)
        if service == "mixed" and chunks is not None and steps is not None:
            return mixed_need(workload, chunks, steps, bounds)
        if service == "attention" and steps is not None:
            instances = max(1, sight.workers.get("decode", 0))
            each = self._capacity_tokens * instances / sight.workers["attention"]
            return attention_need(workload, steps, bounds, instances, each * bounds.utilisation)
        return None

    def _bounds(self, sight: MeshSight) -> Bounds:
        """Where attention workers hold the KV and their number can grow, what they could hold counts."""
        config, capacity = self.config, self._capacity_tokens
        if self._scales_attention(sight):
            capacity *= max(1.0, config.scaling.max_attention / sight.workers["attention"])
        return Bounds(
            ttft_s=config.objectives.ttft_s,
            tpot_s=config.objectives.tpot_s,
            utilisation=config.scaling.utilisation,
            chunk_tokens=sight.chunk_tokens,
            max_decode_batch=config.instance.max_decode_batch,
            capacity_tokens=capacity,
        )
