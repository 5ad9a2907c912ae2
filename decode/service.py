"""The decode room's voice: messages in, events to the state, its commands out to engine, bus and transfer.

Everything here runs on the event loop; only ``decode.engine`` runs elsewhere. An event is handled to its end
before the next one, so the state needs no lock.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.bus import Bus
from common.errors import (
    AttentionLost,
    BusError,
    HandoverFailed,
    InternalError,
    RequestError,
)
from common.ids import GatewayId
from common.instance_metrics import InstanceMetrics
from common.kv.blocks import BlockOwner
from common.laws import step_features
from common.messages import (
    Acknowledged,
    CancelRequest,
    DecodeTask,
    ErrorReply,
    GatewayEvent,
    GatewayGone,
    InstanceEvent,
    InstanceGone,
    KVDelivered,
    LeaveSequence,
    LengthPredicted,
    OfferDeclined,
    OfferWithdrawn,
    ResumeTask,
    SampledToken,
    SequenceMoved,
    TokenBatch,
    Work,
    error_reply,
)
from common.performance import STEP_FEATURES, FittedTime
from common.redelivery import publish_surely
from common.room_spans import RoomSpans
from common.sequences import PublishFailure
from common.shared_engine import Computed, SharedEngine
from common.steps import SequenceStep
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import DECIDE
from common.work_reports import WorkReports
from decode import events
from decode.engine import as_step, load_of, step_work
from decode.homes import HOME_RETRY_S, Homes
from decode.inheritance import Inheritance
from decode.mover import Mover
from decode.puller import Puller
from decode.sequence import ROOM
from decode.speed import smoothed_step_s
from decode.state import DecodeState
from decode.swapper import Swapper
from scheduler.policy.fitting import LinearFit
from scheduler.policy.pass_times import PassTimes

log = logging.getLogger("lamella.decode")


class Staggered(Protocol):
    """Several batches under way at once, one a lane (``decode.pipeline``)."""

    @property
    def lanes(self) -> int: ...

    async def run(
        self, lane: int, batch: Sequence[SequenceStep], requests: str
    ) -> list[SampledToken | None]: ...


@dataclass(slots=True)
class DecodeService:
    """``spawn`` starts a task in the process's task group; ``on_change`` asks for a load report; ``hand_on``
    gives a sequence that leaves to the prefill room, at once. ``swapper`` is there where the state has host
    blocks.

    ``staggered`` computes the steps of several lanes; without it there is one, which ``engine`` computes.
    ``passes``: what the instance learns of the engine's; ``reports``: where it tells of what is done.
    """

    state: DecodeState
    engine: SharedEngine
    puller: Puller
    inheritance: Inheritance
    mover: Mover
    swapper: Swapper | None
    homes: Homes
    hand_on: Callable[[events.HandOn], None]
    bus: Bus
    subjects: Subjects
    metrics: InstanceMetrics
    spawn: Callable[[Coroutine[None, None, None]], None]
    on_change: Callable[[], None]
    passes: PassTimes
    reports: WorkReports
    staggered: Staggered | None = None
    step_s: float | None = None
    _step_time: LinearFit = field(default_factory=lambda: LinearFit(len(STEP_FEATURES)))
    _room_spans: RoomSpans = field(default_factory=lambda: RoomSpans(ROOM))
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def step_time(self) -> FittedTime | None:
        """By steps that were computed alone, or, until there were enough of them, by those that were not."""
        return self._step_time.fitted or self.passes.step_time

    async def decode(self, task: DecodeTask) -> Acknowledged:
        """Takes a sequence over. Raises Overloaded, NoInstanceReady, RequestCancelled, HandoverFailed."""
        self.handle(events.TaskArrived(task))
        self._begin_span(task)
        return Acknowledged()

    def take_over(self, stayed: events.SequenceStayed) -> None:
        """Decodes what this instance's prefill room has computed."""
        self.handle(stayed)
        self._begin_span(stayed.task)

    async def resume(self, task: ResumeTask) -> Acknowledged:
        """Takes a sequence over from a life that is gone. Raises as ``decode``, HandoverFailed without KV."""
        pool = await self.inheritance.find_pool(task)
        self.handle(events.ResumeArrived(task, pool))
        self._begin_span(task)
        return Acknowledged()

    def take_event(self, message: InstanceEvent) -> None:
        """What is told to everyone, or to this instance."""
        match message:
            case CancelRequest():
                self.handle(events.CancelArrived(message.request_id, message.attempt))
            case OfferWithdrawn():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                source = (message.prefill_instance, message.prefill_incarnation)
                self.handle(events.OfferWithdrawn(owner, *source))
            case LeaveSequence():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                self.handle(events.LeaveAsked(owner, message.wanted))
            case LengthPredicted():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                self.handle(events.LengthPredicted(owner, message.lengths))
            case InstanceGone():
                self.handle(events.PrefillGone(message.instance_id, message.incarnation))
                self.puller.give_up(message)
            case GatewayGone():
                self.handle(events.GatewayGone(message.gateway_id))

    def choose_work(self) -> None:
        """The engine asks for it."""
        self.handle(events.PassDue())

    def note_freed(self) -> None:
        """The instance's other room has freed blocks."""
        if self.state.sequences:
            self.handle(events.BlocksFreed())

    def change_role(self, *, is_decode: bool) -> None:
        """Sequences are placed here from now on; or those that run here leave."""
        self.handle(events.RoleChanged(is_decode))

    async def drain(self, timeout_s: float) -> None:
        """Admits nothing more and returns when nothing is left, at the latest after ``timeout_s``."""
        self.handle(events.DrainStarted())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self.handle(events.DrainExpired())

    # commands

    def handle(self, event: events.DecodeEvent) -> None:
        """Gives the state an event and carries out what it says."""
        preempted = self.state.preempted
        began_ns = timeline.begin()
        commands = self.state.handle(event, asyncio.get_running_loop().time())
        for command in commands:
            self._execute(command)
        if isinstance(event, events.PoolLost):
            self.mover.give_up(event.pool)
        timeline.end(began_ns, DECIDE, len(commands))
        self._room_spans.end_departed(self.state.sequences, asyncio.get_running_loop().time())
        if self.state.is_idle:
            self._idle.set()
        else:
            self._idle.clear()
        self.metrics.preempted(self.state.preempted - preempted)
        self.on_change()

    def _execute(self, command: events.DecodeCommand) -> None:
        match command:
            case events.RunStep(rows, lane):
                self._run_step(rows, lane)
            case events.PublishTokens(gateway_id, tokens):
                self._publish(gateway_id, TokenBatch(self.state.instance_id, tokens))
                self._room_spans.note_tokens(tokens)
            case PublishFailure(gateway_id, failure):
                self._publish(gateway_id, failure)
            case events.PullSequence():
                self.spawn(self.puller.carry_out(command, self.handle, self._take_portion))
            case events.InheritSequence():
                self.spawn(self._inherit(command))
            case events.MoveSequence():
                self.spawn(self.mover.carry_out(command, self.handle))
            case events.SwapOut() | events.SwapIn():
                assert self.swapper is not None, "a state without host blocks swaps nobody"
                self.spawn(self.swapper.carry_out(command, self.handle))
            case events.SeekHome():
                self.spawn(self._seek_home(command))
            case events.HandOn(owner, _, request, home):
                moved = SequenceMoved(owner.request_id, owner.attempt, home, len(request.output_ids))
                self._publish(request.gateway_id, moved)
                self.metrics.left()
                self.hand_on(command)
            case events.DeclineOffer(owner, prefill_instance, wanted):
                self.metrics.left()
                subject = self.subjects.instance_events(prefill_instance)
                declined = OfferDeclined(owner.request_id, owner.attempt, self.state.instance_id, wanted)
                publish_surely(self.bus, subject, declined, self.spawn)
            case events.ObserveAdmission(queue_s):
                self.metrics.observe_decode_queue(queue_s)

    def _begin_span(self, task: DecodeTask | ResumeTask) -> None:
        self._room_spans.begin(task.request, asyncio.get_running_loop().time())

    def _run_step(self, rows: tuple[events.StepRow, ...], lane: int) -> None:
        """By the engine that both rooms share, in which its turn is counted from now on, or its lane's."""
        computing = None if self.staggered is not None else self.engine.submit("decode", step_work(rows))
        self.spawn(self._take_step(rows, lane, computing))

    async def _take_step(
        self, rows: tuple[events.StepRow, ...], lane: int, computing: "asyncio.Future[Computed] | None"
    ) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            computed = await (self._stagger(rows, lane) if computing is None else computing)
        except AttentionLost as exc:
            requests = [row.request.request_id for row in rows]
            log.error("attention_lost", extra={"requests": requests, "error": str(exc)})
            computed = Computed((None,) * len(rows), loop.time() - started_s, is_alone=True)
        except Exception:
            log.exception("step_failed", extra={"requests": [row.request.request_id for row in rows]})
            self.handle(
                events.StepFailed(ErrorReply(InternalError.code, "the decode step failed"), lane=lane)
            )
            return
        elapsed_s = computed.elapsed_s
        self.step_s = smoothed_step_s(self.step_s, elapsed_s * self.state.turns.steps_per_token(lane))
        if computed.is_alone:
            load = load_of(rows)
            self._step_time.observe(step_features(load.sequences, load.context_tokens), elapsed_s)
        self.metrics.observe_step(len(rows), elapsed_s)
        self.handle(events.StepFinished(computed.tokens, lane))

    async def _stagger(self, rows: tuple[events.StepRow, ...], lane: int) -> Computed:
        assert self.staggered is not None, "one engine computes all steps"
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        ids = " ".join(row.request.request_id for row in rows) if timeline.is_on else ""
        tokens = tuple(await self.staggered.run(lane, [as_step(row) for row in rows], ids))
        return Computed(tokens, loop.time() - started_s, is_alone=True)

    def _take_portion(self, command: events.PullSequence, delivered: KVDelivered) -> None:
        owner, sequence = command.owner, self.state.sequences.get(command.owner)
        if sequence is not None and delivered.kv_bytes:
            work = Work(
                owner.request_id,
                owner.attempt,
                "transfer",
                delivered.transfer_s,
                kv_bytes=delivered.kv_bytes,
                peer=command.prefill_instance,
            )
            self.reports.tell([(sequence.task.request.gateway_id, work)])
        measured = (delivered.kv_bytes, delivered.transfer_s)
        if delivered.is_last:
            self.handle(events.PullFinished(owner, delivered.first_token, *measured))
        else:
            self.handle(events.PortionPulled(owner, *measured))

    async def _inherit(self, command: events.InheritSequence) -> None:
        owner = command.owner
        try:
            await self.inheritance.copy(command)
        except HandoverFailed as exc:
            log.warning("inherit_failed", extra={"request": owner.request_id, "error": str(exc)})
            self.handle(events.PullFailed(owner, error_reply(exc), is_drained=True))
        else:
            log.info("kv_inherited", extra={"request": owner.request_id, "tokens": command.tokens})
            self.handle(events.PullFinished(owner))

    async def _seek_home(self, command: events.SeekHome) -> None:
        owner = command.owner
        while self.state.departures.is_sought(owner):
            try:
                home = await self.homes.find(command.request, command.wanted)
            except (RequestError, BusError) as exc:
                log.info("home_not_found", extra={"request": owner.request_id, "error": str(exc)})
                if not self.state.departures.is_leaving:
                    break
                await asyncio.sleep(HOME_RETRY_S)
            else:
                self.handle(events.HomeFound(owner, home))
                return
        self.handle(events.SearchEnded(owner))

    def _publish(self, gateway_id: GatewayId, event: GatewayEvent) -> None:
        publish_surely(self.bus, self.subjects.gateway_events(gateway_id), event, self.spawn)
