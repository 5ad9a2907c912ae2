"""The mesh as it is now, from what its members report: ``/api/mesh``, for the page and ``lamella top``.

Pure but for being told the time. Who is there stands in the store, what each does in its load reports, who
leads and what is planned in the store again; links are what instances say that they have sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from common.ids import Incarnation, InstanceId, counted_order
from common.messages import (
    AttentionUse,
    InstanceRecord,
    LinkTraffic,
    LoadReport,
    MemberRecord,
    Role,
    ServiceKind,
    ServiceRecord,
)
from common.performance import CHUNK_FEATURES, STEP_FEATURES, FittedTime
from common.scaling import DesiredCounts
from gateway.private.wishes import WishView

InstanceState = Literal["ready", "draining", "no_workers", "silent"]
"""``silent``: registered, and not heard of for a lease. ``no_workers``: it waits for the attention workers
that are to hold its KV."""
ROLES: tuple[Role, ...] = get_args(Role)
TRAFFIC_WINDOWS = 2.0
"""After so many silent ones a link carries nothing."""


class LawView(msgspec.Struct, frozen=True, kw_only=True):
    """How long a chunk or a step takes (``common.performance``): ``seconds`` for each of what it is made of,
    learned from so many ``samples``, 0: a profile's. ``relative_error``: of its newest predictions."""

    seconds: dict[str, float]
    relative_error: float
    samples: int


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """``queue_tokens``: of prompts, not yet computed. ``running``: sequences in decode steps; ``waiting``: in
    any room. ``kv_used_tokens``: places that are not free. Speeds and laws are None until measured."""

    id: InstanceId
    role: Role
    home: Role
    state: InstanceState
    host: str
    pid: int
    device: str
    queue_tokens: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    prefill_tokens_per_s: float | None
    decode_step_s: float | None
    chunk_law: LawView | None = None
    step_law: LawView | None = None


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one role, in sums."""

    role: Role
    instances: list[InstanceId]
    queue_tokens: int
    running: int
    waiting: int
    kv_used_tokens: int
    kv_total_tokens: int


class LinkView(msgspec.Struct, frozen=True):
    """KV from one instance to another."""

    source: InstanceId
    target: InstanceId
    bytes_per_s: float


class ServiceView(msgspec.Struct, frozen=True):
    """``running``: sequences that an attention worker holds KV of, as the decode instances that it serves
    say, and ``kv_total_tokens`` the places that it has for them; nothing of others."""

    id: str
    kind: ServiceKind
    host: str
    pid: int
    state: Literal["ready", "draining"] = "ready"
    running: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0


class LeaderView(msgspec.Struct, frozen=True):
    id: str
    epoch: int


class MeshView(msgspec.Struct, frozen=True, kw_only=True):
    """``gateway`` is the one that looks. Without the store members are those that were last known, without
    the bus so are their loads. ``wishes``: what its private port takes from who has the admin key; none
    where there is no key. ``wished``: what comes of the newest that were taken up."""

    gateway: str
    model: str
    at_unix_s: float
    is_bus_connected: bool
    is_store_answering: bool
    pools: list[PoolView]
    instances: list[InstanceView]
    links: list[LinkView]
    schedulers: list[str]
    services: list[ServiceView]
    leader: LeaderView | None
    plan: DesiredCounts | None
    wishes: list[str]
    wished: list[WishView] = []

    @property
    def shape(self) -> tuple[object, ...]:
        """What changes seldom, and is to be shown at once when it does."""
        instances = tuple((each.id, each.role, each.state, each.pid) for each in self.instances)
        plan = None if self.plan is None else self.plan.decided_unix_s
        connected = (self.is_bus_connected, self.is_store_answering)
        wished = tuple((each.id, each.state) for each in self.wished)
        services = tuple((each.pid, each.state) for each in self.services)
        return (instances, services, self.leader, plan, connected, wished)


@dataclass(slots=True)
class MeshNews:
    """What has been heard. ``lease_s``: how long a silent member still counts. ``since_s``: when listening
    began; before a lease has passed since then, silence means nothing."""

    lease_s: float
    since_s: float = 0.0
    members: list[MemberRecord] = field(default_factory=list)
    leader: LeaderView | None = None
    plan: DesiredCounts | None = None
    _reports: dict[InstanceId, tuple[float, LoadReport]] = field(default_factory=dict)
    _traffic: dict[InstanceId, tuple[float, LinkTraffic]] = field(default_factory=dict)
    _uses: dict[InstanceId, tuple[float, AttentionUse]] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        """Listening begins, maybe anew: what was heard before is not how anybody is now."""
        self.since_s = now
        self._reports, self._traffic, self._uses = {}, {}, {}

    def take_members(self, members: list[MemberRecord]) -> None:
        """Of who is gone, nothing is kept."""
        self.members = members
        present = {each.instance_id for each in self._records}
        self._reports = {key: each for key, each in self._reports.items() if key in present}
        self._traffic = {key: each for key, each in self._traffic.items() if key in present}
        self._uses = {key: each for key, each in self._uses.items() if key in present}

    def take(self, message: LoadReport | LinkTraffic | AttentionUse, now: float) -> None:
        match message:
            case LoadReport():
                self._reports[message.instance_id] = (now, message)
            case LinkTraffic():
                self._traffic[message.instance_id] = (now, message)
            case AttentionUse():
                self._uses[message.instance_id] = (now, message)

    @property
    def has_heard_everyone(self) -> bool:
        return all(self._report_of(each.instance_id, each.incarnation) for each in self._records)

    @property
    def model(self) -> str | None:
        return next((each.model for each in self._records), None)

    def instances(self, now: float) -> list[InstanceView]:
        return sorted(
            (self._instance(each, now) for each in self._records), key=lambda each: counted_order(each.id)
        )

    def links(self, now: float) -> list[LinkView]:
        """Those over which bytes went a moment ago."""
        return [
            LinkView(source, target, nbytes / traffic.window_s)
            for source, (heard_s, traffic) in sorted(self._traffic.items())
            for target, nbytes in sorted(traffic.sent_bytes.items())
            if now - heard_s < TRAFFIC_WINDOWS * traffic.window_s
        ]

    def services(self, now: float) -> list[ServiceView]:
        records = [each for each in self.members if isinstance(each, ServiceRecord)]
        return sorted(
            (self._service(each, now) for each in records),
            key=lambda each: (each.kind, counted_order(each.id)),
        )

    def _service(self, record: ServiceRecord, now: float) -> ServiceView:
        """What instances that fell silent have told of it counts no more."""
        told = [use.workers for heard_s, use in self._uses.values() if now - heard_s < self.lease_s]
        uses = [workers[record.service_id] for workers in told if record.service_id in workers]
        return ServiceView(
            id=record.service_id,
            kind=record.kind,
            host=record.host,
            pid=record.pid,
            state="draining" if record.is_draining else "ready",
            running=sum(each.sequences for each in uses),
            kv_used_tokens=sum(each.used_tokens for each in uses),
            kv_total_tokens=sum(each.total_tokens for each in uses),
        )

    @property
    def _records(self) -> list[InstanceRecord]:
        return [each for each in self.members if isinstance(each, InstanceRecord)]

    def _report_of(
        self, instance_id: InstanceId, incarnation: Incarnation
    ) -> tuple[float, LoadReport] | None:
        """Not of an earlier life."""
        heard = self._reports.get(instance_id)
        return None if heard is None or heard[1].incarnation != incarnation else heard

    def _instance(self, record: InstanceRecord, now: float) -> InstanceView:
        heard_s, report = self._report_of(record.instance_id, record.incarnation) or (self.since_s, None)
        state: InstanceState = "ready"
        if now - heard_s > self.lease_s:
            state = "silent"
        elif report is not None and report.is_draining:
            state = "draining" if report.largest_pool_blocks else "no_workers"
        if report is None:
            report = _nothing_yet(record)
        return InstanceView(
            id=record.instance_id,
            role=report.role,
            home=report.home or report.role,
            state=state,
            host=record.host,
            pid=record.pid,
            device=record.device,
            queue_tokens=report.pending_prefill_tokens,
            running=report.decode_running,
            waiting=report.pending_prefill_requests + report.handovers_waiting + report.decode_waiting,
            kv_used_tokens=record.block_size * (report.total_blocks - report.free_blocks),
            kv_total_tokens=record.block_size * report.total_blocks,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_s=report.decode_step_s,
            chunk_law=_law(CHUNK_FEATURES, report.chunk_time or record.chunk_time),
            step_law=_law(STEP_FEATURES, report.step_time or record.step_time),
        )


def _law(features: Sequence[str], fitted: FittedTime | None) -> LawView | None:
    if fitted is None:
        return None
    return LawView(
        seconds=dict(zip(features, fitted.coefficients, strict=True)),
        relative_error=fitted.relative_error,
        samples=fitted.samples,
    )


def pools_of(instances: list[InstanceView]) -> list[PoolView]:
    """Of each role that somebody has."""
    pools = []
    for role in ROLES:
        members = [each for each in instances if each.role == role]
        if members:
            pools.append(
                PoolView(
                    role=role,
                    instances=[each.id for each in members],
                    queue_tokens=sum(each.queue_tokens for each in members),
                    running=sum(each.running for each in members),
                    waiting=sum(each.waiting for each in members),
                    kv_used_tokens=sum(each.kv_used_tokens for each in members),
                    kv_total_tokens=sum(each.kv_total_tokens for each in members),
                )
            )
    return pools


def _nothing_yet(record: InstanceRecord) -> LoadReport:
    """Of an instance that has not been heard: as it was at its start."""
    return LoadReport(
        instance_id=record.instance_id,
        incarnation=record.incarnation,
        sequence=0,
        role=record.role,
        is_draining=False,
        pending_prefill_tokens=0,
        pending_prefill_requests=0,
        handovers_waiting=0,
        decode_running=0,
        decode_waiting=0,
        decode_tokens=0,
        total_blocks=record.total_blocks,
        largest_pool_blocks=record.largest_pool_blocks,
        free_blocks=record.total_blocks,
        home=record.home,
    )
