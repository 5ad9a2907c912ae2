"""Puts an instance together: both rooms over one engine and one pool of KV."""

import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.ids import Incarnation, InstanceId
from common.instance_metrics import InstanceMetrics
from common.kv.blocks import BlockAllocator
from common.kv.endpoint import KVEndpoint
from common.kv.link_watch import LinkWatch
from common.kv.tier import HostTier
from common.load import LoadReporter
from common.messages import HostProcess, InstanceLife, KVDestination, has_phase
from common.redelivery import publish_surely
from common.room_mates import RoomMates
from common.shared_engine import SharedEngine
from common.subjects import Subjects
from common.transfer.buffers import host_identity
from common.transfer.endpoint import TransferEndpoint
from common.work_reports import WorkReports
from decode.context_turns import ContextTurns
from decode.events import HandOn, SequenceStayed
from decode.homes import Homes
from decode.inheritance import Inheritance
from decode.mover import Mover
from decode.puller import Puller
from decode.pulls import Pulls
from decode.service import DecodeService, Staggered
from decode.state import DecodeState
from decode.swapper import Swapper
from prefill.events import SequenceLeft
from prefill.prompts import PromptQueue
from prefill.service import PrefillService
from prefill.state import PrefillState
from scheduler.policy.mixed_batching import PassChoice
from scheduler.policy.pass_times import PassTimes
from scheduler.policy.prefill_batching import fill_batch_of
from scheduler.policy.pull_budget import PullBudget
from services.hosts.engines import Engine, pull_share_of
from services.hosts.instance import Instance
from services.hosts.shared_blocks import SharedBlocks

Spawn = Callable[[Coroutine[None, None, None]], None]


@dataclass(slots=True)
class _Parts:
    """What both rooms of an instance share. ``pool_destinations``: where attention workers hold its KV, if
    they do."""

    config: Config
    instance_id: InstanceId
    incarnation: Incarnation
    engine: Engine
    transfer: TransferEndpoint
    bus: Bus
    metrics: InstanceMetrics
    spawn: Spawn
    pool_destinations: dict[int, tuple[KVDestination, ...]] = field(default_factory=dict)
    passes: PassTimes = field(default_factory=PassTimes)
    subjects: Subjects = field(init=False)
    blocks: BlockAllocator = field(init=False)
    shared_engine: SharedEngine = field(init=False)
    mates: RoomMates = field(init=False)
    kv: KVEndpoint = field(init=False)
    links: LinkWatch = field(init=False)
    reports: WorkReports = field(init=False)

    def __post_init__(self) -> None:
        engine, settings = self.engine, self.config.instance
        self.subjects = Subjects(self.config.mesh.namespace)
        self.blocks = BlockAllocator(engine.total_blocks)
        remote = None if engine.total_blocks else self.pool_destinations
        self.kv = KVEndpoint(self.transfer, engine.layout, engine.total_blocks, remote)
        pass_tokens = settings.chunk_tokens or engine.chunk_tokens
        choice = PassChoice(settings.mixed_policy, pass_tokens, settings.mixed_max_wait_s)
        self.mates = RoomMates(
            settings.mixed_policy, settings.mixed_max_wait_s, is_mixed=settings.role == "mixed"
        )
        self.shared_engine = SharedEngine(
            engine.runner,
            engine.thread,
            self.spawn,
            self.mates,
            choice,
            self.passes.observe,
            self.metrics.observe_wait,
            self.metrics.observe_gap,
        )
        self.links = LinkWatch(
            self.instance_id,
            self.config.transfer.suspect_after_s,
            lambda word: publish_surely(self.bus, self.subjects.scheduler_events(), word, self.spawn),
        )
        self.reports = WorkReports(self.instance_id, self.bus, self.subjects)


def build_instance(
    config: Config,
    instance_id: InstanceId,
    incarnation: Incarnation,
    engine: Engine,
    transfer: TransferEndpoint,
    bus: Bus,
    metrics: InstanceMetrics,
    spawn: Spawn,
    staggered: Staggered | None = None,
) -> Instance:
    """The pool is registered as ``KV_REGION``.

    An engine without a pool of its own (``total_blocks`` 0) gets pools of attention workers later, and may
    compute several batches that take turns.
    """
    parts = _Parts(config, instance_id, incarnation, engine, transfer, bus, metrics, spawn)
    reporter = LoadReporter(config.instance.report_interval_s, config.instance.report_gap_s)
    shared = SharedBlocks(parts.blocks)

    def note_prefill() -> None:
        reporter.note_change()
        shared.note_change(decode.note_freed)

    def note_decode() -> None:
        reporter.note_change()
        shared.note_change(prefill.note_freed)

    prefill = PrefillService(
        state=_prefill_state(parts),
        engine=parts.shared_engine,
        kv=parts.kv,
        bus=bus,
        subjects=parts.subjects,
        metrics=metrics,
        call_timeout_s=config.mesh.call_timeout_s,
        spawn=spawn,
        on_change=note_prefill,
        keep_here=lambda command: decode.take_over(SequenceStayed(command.held_by, command.task)),
        passes=parts.passes,
        reports=parts.reports,
        links=parts.links,
    )
    decode = _decode_service(
        parts, staggered, note_decode, lambda command: prefill.take_over(_as_left(command))
    )
    parts.shared_engine.ask_room = lambda phase: (
        prefill.choose_work() if phase == "prefill" else decode.choose_work()
    )
    return Instance(
        instance_id,
        incarnation,
        config.instance.role,
        engine.total_blocks > 0,
        config,
        parts.blocks,
        prefill,
        decode,
        bus,
        parts.subjects,
        metrics,
        reporter,
        parts.pool_destinations,
        engine.chunk_time,
        engine.step_time,
    )


def _prefill_state(parts: _Parts) -> PrefillState:
    engine, settings = parts.engine, parts.config.instance
    return PrefillState(
        instance_id=parts.instance_id,
        incarnation=parts.incarnation,
        blocks=parts.blocks,
        layout=engine.layout,
        eos_token_ids=engine.eos_token_ids,
        chunk_tokens=settings.chunk_tokens or engine.chunk_tokens,
        prompts=PromptQueue(
            settings.prefill_order, settings.scheduling_window, settings.prefill_aging_tokens_per_s
        ),
        max_waiting_requests=settings.max_waiting_requests,
        layerwise_min_tokens=parts.config.transfer.layerwise_min_tokens or engine.layerwise_min_tokens,
        fill_batch=fill_batch_of(settings.prefill_batching, settings.prefill_order),
        is_admitting=has_phase(settings.role, "prefill"),
        process=HostProcess(host_identity(), os.getpid()),
        mates=parts.mates,
    )


def _decode_state(parts: _Parts, lanes: int) -> DecodeState:
    engine, settings = parts.engine, parts.config.instance
    tier = _host_tier(engine)
    return DecodeState(
        instance_id=parts.instance_id,
        blocks=parts.blocks,
        block_size=settings.block_size,
        eos_token_ids=engine.eos_token_ids,
        max_batch=settings.max_decode_batch,
        max_waiting_requests=settings.max_waiting_requests,
        admission=settings.decode_admission,
        is_admitting=has_phase(settings.role, "decode"),
        lanes=lanes,
        max_moves=settings.attention_moves,
        min_move_gain_tokens=settings.attention_move_gain_tokens,
        host_blocks=0 if tier is None else tier.total_blocks,
        block_bytes=engine.layout.block_bytes,
        turns=ContextTurns(settings.max_step_context_tokens),
        pulls=_pulls(parts.config),
        mates=parts.mates,
    )


def _pulls(config: Config) -> Pulls:
    return Pulls(PullBudget(pull_share_of(config)), config.transfer.mode == "push")


def _decode_service(
    parts: _Parts,
    staggered: Staggered | None,
    on_change: Callable[[], None],
    hand_on: Callable[[HandOn], None],
) -> DecodeService:
    bus, subjects, engine = parts.bus, parts.subjects, parts.engine
    call_timeout_s = parts.config.mesh.call_timeout_s
    tier = _host_tier(engine)
    inheritance = Inheritance(bus, subjects, call_timeout_s)
    return DecodeService(
        state=_decode_state(parts, 1 if staggered is None else staggered.lanes),
        engine=parts.shared_engine,
        puller=Puller(
            parts.instance_id,
            bus,
            subjects,
            parts.kv,
            parts.links,
            parts.config.transfer.deadline_s + call_timeout_s,
        ),
        inheritance=inheritance,
        mover=Mover(
            bus, subjects, parts.metrics, call_timeout_s, inheritance.workers, parts.pool_destinations
        ),
        swapper=None if tier is None else Swapper(tier, engine.thread, parts.metrics),
        homes=Homes(bus, subjects, InstanceLife(parts.instance_id, parts.incarnation), call_timeout_s),
        hand_on=hand_on,
        bus=bus,
        subjects=subjects,
        metrics=parts.metrics,
        spawn=parts.spawn,
        on_change=on_change,
        passes=parts.passes,
        reports=parts.reports,
        staggered=staggered,
    )


def _host_tier(engine: Engine) -> HostTier | None:
    """For what is swapped out: attention workers have none."""
    return engine.host_tier if engine.total_blocks else None


def _as_left(command: HandOn) -> SequenceLeft:
    """From one room's words to the other's."""
    home = command.home
    return SequenceLeft(
        command.held_by, command.request, home.decode_instance, home.decode_incarnation, command.lengths
    )
