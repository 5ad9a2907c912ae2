"""One instance: a model, a KV pool, and both rooms over them. Its role says which rooms admit work.

Start-up order matters: the model and the pool first, then the wires, then the subscriptions, and only then
the record in the store, so whoever finds the instance can use it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.epochs import EpochFence
from common.errors import BusError, InvalidRequest, LeaderSuperseded, NoInstanceReady
from common.ids import Incarnation, InstanceId
from common.instance_metrics import InstanceMetrics
from common.kv.blocks import BlockAllocator
from common.load import LoadReporter
from common.messages import (
    Acknowledged,
    AreYouThere,
    DecodeTask,
    FlipProgress,
    FlipRole,
    InstanceCall,
    InstanceEvent,
    InstanceRecord,
    KVDelivered,
    KVDestination,
    LeaderAnnounced,
    LeaveSequence,
    LoadReport,
    PrefillTask,
    PullKV,
    ResumeTask,
    Role,
    has_phase,
)
from common.performance import FittedTime
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import KV_BLOCKS, QUEUES, RUNNING
from decode.service import DecodeService
from prefill.service import PrefillService
from services.hosts.engines import Engine
from services.hosts.load_report import Asked, asked_by, make_load_report
from services.hosts.measured_speed import MeasuredSpeed
from services.hosts.shared_blocks import leaked_blocks

log = logging.getLogger("lamella.instance")


@dataclass(slots=True)
class Instance:
    """Both rooms and the load report that speaks for them. ``has_own_kv``: not attention workers hold it.
    ``home``: the role that it goes back to. ``write_record``: that with its role, once there is one."""

    instance_id: InstanceId
    incarnation: Incarnation
    role: Role
    has_own_kv: bool
    config: Config
    blocks: BlockAllocator
    prefill: PrefillService
    decode: DecodeService
    bus: Bus
    subjects: Subjects
    metrics: InstanceMetrics
    reporter: LoadReporter
    pool_destinations: dict[int, tuple[KVDestination, ...]]
    profiled_chunk_time: FittedTime | None = None
    profiled_step_time: FittedTime | None = None
    reports_sent: int = 0
    write_record: Callable[[], Awaitable[None]] | None = None
    is_draining: bool = False
    switch_s: float = 0.0
    leaders: EpochFence = field(default_factory=EpochFence)
    home: Role = field(init=False)
    _asked: Asked = field(init=False)

    def __post_init__(self) -> None:
        self.home, scheduler = self.role, self.config.scheduler
        self._asked = asked_by(scheduler, are_rules_judged=scheduler.shadow_share > 0)

    async def subscribe(self) -> None:
        """Returns when every subscription is active."""
        await self.bus.subscribe(self.subjects.everyone(), InstanceEvent, self._take_event)
        await self.bus.subscribe(self.subjects.leader(), LeaderAnnounced, self._note_leader)
        await self.bus.subscribe(
            self.subjects.instance_events(self.instance_id), InstanceEvent, self._take_event
        )
        await self.bus.serve(self.subjects.instance_calls(self.instance_id), InstanceCall, self._answer)

    async def follow(self, take_event: Callable[[InstanceEvent], None]) -> None:
        """Somebody else of this process hears what this instance is told, too."""
        for subject in (self.subjects.instance_events(self.instance_id), self.subjects.everyone()):
            await self.bus.subscribe(subject, InstanceEvent, take_event)

    async def drain(self, timeout_s: float) -> None:
        """Both rooms finish or give back what they hold."""
        self.is_draining = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await asyncio.gather(self.prefill.drain(timeout_s), self.decode.drain(timeout_s))
        # What was computed last may have stayed to be decoded.
        await self.decode.drain(max(0.0, deadline_s - loop.time()))
        self.publish_load()

    async def flip(self, role: Role, *, keeps_home: bool = False) -> FlipProgress:
        """Has that role from now on, which the scheduler hears at once; what the former one has here goes on.

        Raises InvalidRequest where the KV is not its own, NoInstanceReady where it is about to end.
        """
        if not self.has_own_kv:
            raise InvalidRequest(
                f"{self.instance_id} has its KV on attention workers, and no memory for prompts: its role is"
                " fixed",
                param="role",
            )
        if self.is_draining:
            raise NoInstanceReady(f"instance {self.instance_id} is draining")
        home = self.home if keeps_home else role
        if (role, home) != (self.role, self.home):
            began_s = asyncio.get_running_loop().time()
            if role != self.role:
                self.decode.state.mates.is_mixed = role == "mixed"
                self.prefill.change_role(is_prefill=has_phase(role, "prefill"))
                self.decode.change_role(is_decode=has_phase(role, "decode"))
            self.role, self.home = role, home
            self.publish_load()
            self.switch_s = asyncio.get_running_loop().time() - began_s
            log.info("role_flipped", extra={"role": role, "home": home, "switch_s": self.switch_s})
            if self.write_record is not None:
                await self.write_record()
        return FlipProgress(self.switch_s, self._left(role), self.decode.state.departures.departed)

    def _left(self, role: Role) -> int:
        """Sequences that such an instance would not have here."""
        prefill, decode = self.prefill.state, self.decode.state
        match role:
            case "prefill":
                return len(decode.sequences) + prefill.moving + prefill.staying
            case "decode":
                return len(prefill.sequences)
            case "mixed":
                return 0

    def record(self, http_url: str, host: str, pid: int, engine: Engine) -> InstanceRecord:
        return InstanceRecord(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            role=self.role,
            model=engine.model_name,
            host=host,
            pid=pid,
            http_url=http_url,
            block_size=self.config.instance.block_size,
            total_blocks=self.blocks.total_blocks,
            largest_pool_blocks=self.blocks.largest_pool_blocks,
            context_length=engine.context_length,
            dtype=engine.dtype,
            device=self.config.model.device.partition(":")[0],
            home=self.home,
            chunk_time=self.chunk_time,
            step_time=self.step_time,
        )

    @property
    def chunk_time(self) -> FittedTime | None:
        return self.prefill.speed.chunk_time or self.profiled_chunk_time

    @property
    def step_time(self) -> FittedTime | None:
        return self.decode.step_time or self.profiled_step_time

    async def _answer(self, call: InstanceCall) -> Acknowledged | KVDelivered | FlipProgress:
        match call:
            case PrefillTask():
                return await self.prefill.prefill(call)
            case DecodeTask():
                return await self.decode.decode(call)
            case ResumeTask():
                return await self.decode.resume(call)
            case PullKV():
                return await self.prefill.pull(call)
            case FlipRole(role, epoch, keeps_home):
                self.leaders.admit(epoch)
                return await self.flip(role, keeps_home=keeps_home)
            case AreYouThere():
                return Acknowledged()

    def _note_leader(self, message: LeaderAnnounced) -> None:
        self.leaders.note(message.epoch)

    def _take_event(self, message: InstanceEvent) -> None:
        if isinstance(message, LeaveSequence):
            try:
                self.leaders.admit(message.epoch)
            except LeaderSuperseded as exc:
                log.warning("leader_superseded", extra={"request": message.request_id, "error": str(exc)})
                return
        self.prefill.take_event(message)
        self.decode.take_event(message)

    def publish_load(self) -> None:
        self.prefill.note_time()
        self.reports_sent += 1
        prefill, decode, speed = self.prefill.state, self.decode.state, self.prefill.speed
        report = make_load_report(
            prefill,
            decode,
            MeasuredSpeed(
                prefill_tokens_per_s=speed.tokens_per_s,
                decode_step_s=self.decode.step_s,
                chunk_time=self.chunk_time,
                step_time=self.step_time,
            ),
            sequence=self.reports_sent,
            role=self.role,
            home=self.home,
            can_hand_on=self.has_own_kv,
            tpot_s=self._promised_tpot_s,
            now=asyncio.get_running_loop().time(),
            asked=self._asked,
        )
        leaked = leaked_blocks(self.blocks, (*prefill.sequences, *decode.sequences))
        self.metrics.observe_load(report, self.blocks.quarantined_blocks, leaked, decode.block_size)
        self._count(report)
        try:
            self.bus.publish(self.subjects.scheduler_events(), report)
        except BusError as exc:
            log.warning("load_unreported", extra={"error": str(exc)})

    def _promised_tpot_s(self, service_class: str) -> float:
        return self.config.service_classes.get(service_class, self.config.objectives).tpot_s

    def _count(self, report: LoadReport) -> None:
        """The load, on the timeline."""
        queues = (report.pending_prefill_requests, report.handovers_waiting, report.decode_waiting)
        timeline.count(QUEUES, *queues)
        timeline.count(RUNNING, report.decode_running)
        quarantined = self.blocks.quarantined_blocks
        timeline.count(KV_BLOCKS, report.total_blocks - report.free_blocks - quarantined, quarantined)
