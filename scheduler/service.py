"""The scheduler's voice: places requests, watches who lives, tells everyone who is gone.

Calls arrive at a queue group, so several schedulers may run; each hears every report, and of the others'
bookings (``scheduler.sharing``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.errors import (
    BusError,
    BusTimeout,
    InvalidRequest,
    MessageTooLarge,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    RequestError,
    StoreError,
)
from common.messages import (
    Acknowledged,
    CancelRequest,
    GenerationRequest,
    InstanceLife,
    InstanceRecord,
    LoadReport,
    MemberRecord,
    Placement,
    PlaceMoved,
    PrefillTask,
    Queued,
    RequestEnded,
    ResumeTask,
    SchedulerCall,
    SchedulerEvent,
    SubmitAnswer,
    SubmitRequest,
)
from common.spans import Attributes, spans
from common.store import Store
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import DISPATCH, OPEN_REQUESTS
from scheduler import events
from scheduler.announcing import Announcer
from scheduler.delivery import NO_ANSWER_RETRY_S, Delivery
from scheduler.handing_over import HandingOver
from scheduler.length_questions import LengthQuestions
from scheduler.lifelines import Lifelines
from scheduler.metrics import SchedulerMetrics
from scheduler.mirror import Mirror
from scheduler.scaling import Scaling
from scheduler.sharing import Sharing
from scheduler.state import SchedulerState
from scheduler.turns import HOLD_S, Turns

log = logging.getLogger("lamella.scheduler")

QUEUE_GROUP = "scheduler"
MAX_CALLS = 256
"""That are answered at once, beside those that are held."""


@dataclass(slots=True)
class SchedulerService:
    """``spawn`` starts a task in the process's task group. ``leading_epoch``: None where it does not lead."""

    scheduler_id: str
    state: SchedulerState
    bus: Bus
    store: Store
    subjects: Subjects
    metrics: SchedulerMetrics
    config: Config
    is_read_due: asyncio.Event
    spawn: Callable[[Coroutine[None, None, None]], None]
    leading_epoch: Callable[[], int | None] = lambda: None
    scaling: Scaling | None = None
    announcer: Announcer = field(init=False)
    sharing: Sharing = field(init=False)
    turns: Turns = field(init=False)
    mirror: Mirror = field(init=False)
    questions: LengthQuestions = field(init=False)
    lifelines: Lifelines = field(init=False)
    handing_over: HandingOver = field(default_factory=HandingOver)
    _has_told_departed: bool = False
    _reported: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        call_timeout_s = self.config.mesh.call_timeout_s
        self.turns = Turns(min(HOLD_S, call_timeout_s))
        self.announcer = Announcer(self.bus, self.subjects, self.metrics, self.leading_epoch)
        self.sharing = Sharing(
            self.scheduler_id, self.state, self.bus, self.subjects, call_timeout_s, self._handle
        )
        self.mirror = Mirror(self.store, self.state.bookings, self.config.mesh.heartbeat_s, self._handle)
        self.lifelines = Lifelines(self.bus, self.subjects, self._note_ended, self.spawn)
        self.metrics.follow_lifelines(lambda: self.lifelines.open)
        self.questions = LengthQuestions(
            self.config.predictor,
            self.state.placer,
            self.bus,
            self.subjects,
            self.metrics,
            self.spawn,
            self._handle,
        )

    async def start(self) -> None:
        """Subscribes; returns when every subscription is active, and what other schedulers have booked and
        instances report is known."""
        await self.bus.subscribe(self.subjects.scheduler_events(), SchedulerEvent, self._take_event)
        members = await self._read_members()
        # Before others are asked: what has ended since, they say.
        await self.mirror.read()
        await self.sharing.start(members)
        await self._hear_instances()
        # Whoever takes calls has been heard: one that died before could not be missed, and what it had would
        # wait for its answer.
        self.sharing.beat()
        await self.bus.serve(
            self.subjects.submit(),
            SchedulerCall,
            self._answer,
            queue=QUEUE_GROUP,
            max_concurrent=MAX_CALLS + self.config.scheduler.max_deferred_requests,
        )
        await self._tell_former_life()

    async def _tell_former_life(self) -> None:
        """Calls that it took and did not answer are made again, by gateways whom no other scheduler tells."""
        try:
            former = await self.store.former_lives("scheduler", self.scheduler_id, self.state.incarnation)
        except StoreError as exc:
            log.warning("former_lives_unread", extra={"error": str(exc)})
            return
        for incarnation in former:
            self.announcer.announce(events.AnnounceSchedulerGone(self.scheduler_id, incarnation))

    async def _hear_instances(self) -> None:
        """Until each has reported, or a heartbeat has passed: whoever takes calls sooner refuses what another
        scheduler would place."""
        try:
            async with asyncio.timeout(self.config.mesh.heartbeat_s):
                while any(view.report is None for view in self.state.instances.values()):
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            unheard = [name for name, view in self.state.instances.items() if view.report is None]
            log.warning("instances_unheard", extra={"instances": ", ".join(unheard)})

    async def watch(self) -> None:
        """Reads the members and notices silence, every heartbeat and when somebody unknown speaks."""
        was_heard, began_s = True, asyncio.get_running_loop().time()
        while True:
            is_heard = await self._hears_everyone()
            if is_heard:
                if not was_heard:
                    self._handle(events.BusRestored())
                await self._read_members()
                self._handle(events.TimePassed())
                if not self._has_told_departed:
                    await self._tell_departed(began_s)
                self.sharing.beat()
                if self.config.scheduler.rebalance_decodes and self.leading_epoch() is not None:
                    self._handle(events.RebalanceDue())
            was_heard = is_heard
            try:
                async with asyncio.timeout(self.config.mesh.heartbeat_s):
                    await self.is_read_due.wait()
            except TimeoutError:
                pass
            self.is_read_due.clear()

    async def _tell_departed(self, began_s: float) -> None:
        """Once, after a lease in which whoever lives has been heard: of instances that died while nobody who
        knew them lived, no other scheduler tells their gateways."""
        if asyncio.get_running_loop().time() - began_s < self.config.mesh.lease_s:
            return
        try:
            departed = await self.store.departed()
        except StoreError as exc:
            log.warning("departed_unread", extra={"error": str(exc)})
            return
        self._has_told_departed = True
        self._handle(events.DepartedRead(tuple(departed)))

    async def _hears_everyone(self) -> bool:
        """Whether the bus answers, and so has delivered what was sent: a NATS that hangs makes all silent."""
        if not self.bus.is_connected:
            return False
        try:
            await self.bus.flush(self.config.mesh.heartbeat_s)
        except BusError:
            return False
        return True

    async def _answer(self, call: SchedulerCall) -> SubmitAnswer:
        match call:
            case SubmitRequest():
                return await self.submit(call)
            case PlaceMoved(request, former, wanted, refused):
                now = asyncio.get_running_loop().time()
                placement = self.state.place_moved(request, former, now, wanted, refused)
                self._carry_out(self.state.tell_length(request))
                return placement

    async def submit(self, message: SubmitRequest) -> SubmitAnswer:
        """Places a request and delivers it, at once or when its turn has come. Raises the reason when nobody
        can take it."""
        loop = asyncio.get_running_loop()
        wanted_s = loop.time() - message.wanted_for_s
        try:
            return await self._submit(message)
        finally:
            request, waited_s = message.request, loop.time() - wanted_s
            self.state.placer.log.note_wait(request.request_id, request.attempt, waited_s)

    async def _submit(self, message: SubmitRequest) -> SubmitAnswer:
        request = message.request
        if self.scaling is not None and request.request_id not in self.state.waiting:
            self.scaling.note_submitted(request)
        for instance_id in message.lost_instances:
            self._handle(events.InstanceSuspected(instance_id))
        loop = asyncio.get_running_loop()
        began_ns, started_s = timeline.begin(), loop.time()
        if message.former is not None:
            resumed = await self._try_resume(request, message.former)
            if resumed is not None:
                self._note_placed(request, resumed, began_ns, started_s, message.waited_s)
                return resumed
        delivery = Delivery(self.state, request, self.config.scheduler.dispatch_attempts)
        if self._is_deferred(request):
            delivery.bound = await self._wait_turn(request, message.waited_s)
            if delivery.bound is None:
                return Queued()
        while True:
            placement = delivery.place(loop.time())
            self.sharing.tell()
            self.questions.ask(request)
            try:
                await self._deliver(delivery.task(placement), placement)
            except MessageTooLarge as exc:
                self._handle(events.TaskUndelivered(request.request_id, request.attempt))
                raise InvalidRequest(f"the prompt does not fit a message: {exc}", param="prompt") from exc
            except (RequestError, BusError) as exc:
                happened, told = delivery.fail(placement, exc if isinstance(exc, RequestError) else None)
                for event in happened:
                    self._handle(event)
                if told is exc:
                    raise
                if told is not None:
                    raise told from exc
                log.warning("task_undelivered", extra={"request": request.request_id, "error": str(exc)})
            else:
                self._note_placed(request, placement, began_ns, started_s, message.waited_s)
                return placement

    def _is_deferred(self, request: GenerationRequest) -> bool:
        """A stream that broke does not wait behind those that have not begun. Where this scheduler leaves,
        whoever still comes is placed at once: one that has not waited yet would be refused for good."""
        is_policy = self.config.scheduler.prefill_policy == "deferred"
        return is_policy and not request.output_ids and not self.turns.is_leaving

    async def _wait_turn(self, request: GenerationRequest, waited_s: float) -> Placement | None:
        """Booked; None: it waits, and its gateway is to ask again. Raises the refusal."""
        request_id, loop = request.request_id, asyncio.get_running_loop()
        is_new = request_id not in self.state.waiting and not waited_s
        # A call that is refused here is not held, and takes nobody's place.
        commands = self.state.wait(request, loop.time(), waited_s)
        turn = self.turns.begin(request_id)
        try:
            self._carry_out(commands)
            return await self.turns.wait(turn, is_new=is_new)
        finally:
            if self.turns.end_call(request_id, turn):
                self._handle(events.CallAnswered(request_id))

    async def _try_resume(self, request: GenerationRequest, former: InstanceLife) -> Placement | None:
        """On the least loaded decode instance; None where it finds no KV, or there is none: attention workers
        alone keep any.

        Raises RequestCancelled; NoInstanceReady where it may have taken the request over.
        """
        if not self.state.members.has_attention(asyncio.get_running_loop().time()):
            return None
        try:
            placement = self.state.place_resumed(request, asyncio.get_running_loop().time())
        except (NoInstanceReady, Overloaded, InvalidRequest):
            return None
        self.sharing.tell()
        self.questions.ask(request)
        try:
            await self._deliver(ResumeTask(request, former, self.state.placer.predict(request)), placement)
        except (BusError, RequestError) as exc:
            is_wanted = self.state.is_placed(request.request_id, request.attempt)
            self._handle(events.TaskUndelivered(request.request_id, request.attempt))
            if isinstance(exc, RequestCancelled) or not is_wanted:
                raise RequestCancelled(f"request {request.request_id} ended while it was placed") from exc
            log.info("not_resumed", extra={"request": request.request_id, "error": str(exc)})
            if isinstance(exc, BusTimeout):
                self._handle(events.InstanceSuspected(placement.decode_instance))
                raise NoInstanceReady(
                    f"decode instance {placement.decode_instance} did not answer",
                    retry_after_s=NO_ANSWER_RETRY_S,
                ) from exc
            return None
        return placement

    def _note_placed(
        self,
        request: GenerationRequest,
        placement: Placement,
        began_ns: int,
        started_s: float,
        waited_s: float,
    ) -> None:
        """``waited_s``: at schedulers, before this call of its."""
        self._handle(events.TaskAcknowledged(request.request_id, request.attempt))
        self.metrics.observe_placement(asyncio.get_running_loop().time() - started_s)
        peer = placement.prefill_instance
        facts: Attributes = {
            "lamella.request.id": request.request_id,
            "lamella.attempt": request.attempt,
            "lamella.service_class": request.service_class,
            "lamella.prefill_instance": placement.prefill_instance,
            "lamella.decode_instance": placement.decode_instance,
        }
        now = asyncio.get_running_loop().time()
        spans.record("scheduler.queue", request.traceparent, started_s - waited_s, facts, now)
        timeline.end(began_ns, DISPATCH, request.attempt, requests=request.request_id, peer=peer)
        self._judge_policies()

    def _judge_policies(self) -> None:
        """After the delivery, on time that is its own: by what the newest decision saw."""
        placer = self.state.placer
        look, placer.look = placer.look, None
        if look is None or not placer.regret.budget.may_spend(asyncio.get_running_loop().time()):
            return
        began_s = time.thread_time()
        placer.regret.judge(look)
        placer.regret.spend(time.thread_time() - began_s)

    async def _deliver(self, task: PrefillTask | ResumeTask, placement: Placement) -> None:
        instance_id = placement.prefill_instance
        subject = self.subjects.instance_calls(instance_id)
        life = InstanceLife(instance_id, placement.prefill_incarnation)
        try:
            call = self.bus.call(subject, task, Acknowledged, self.config.mesh.call_timeout_s)
            await self.handing_over.wait(life, call)
        except BusTimeout:
            request = task.request
            cancel = CancelRequest(request.request_id, request.attempt)
            self.bus.publish(self.subjects.instance_events(instance_id), cancel)
            raise

    def _take_event(self, message: SchedulerEvent) -> None:
        match message:
            case LoadReport():
                self._handle(events.LoadReported(message))
                self._reported.set()
            case RequestEnded():
                if self.scaling is not None:
                    self.scaling.note_ended(message)
                drew = (message.prompt_tokens, message.output_tokens, message.is_cut, message.attempt)
                measured = (message.ttft_s, message.tpot_s)
                self._handle(events.RequestOver(message.request_id, *drew, *measured))
            case word:
                facts = {"word": type(word).__name__, "sender": word.sender, "receiver": word.receiver}
                log.warning("kv_link_heard_of", extra=facts)
                self._handle(events.LinkHeard(word))

    def _note_ended(self, record: MemberRecord) -> None:
        """Whom an attention worker served gives it up; what it held is no scheduler's."""
        if isinstance(record, InstanceRecord):
            self._handle(events.InstanceEnded(record.life))
        else:
            life = record.service_id, record.incarnation
            self.announcer.announce(events.AnnounceAttentionGone(*life, was_leaving=record.is_draining))

    async def _read_members(self) -> list[MemberRecord]:
        """Nobody where the store does not answer."""
        try:
            records = await self.store.members()
        except StoreError as exc:
            log.warning("members_unread", extra={"error": str(exc)})
            return []
        known = {view.record.life for view in self.state.instances.values()}
        self._handle(events.MembersRead(tuple(records)))
        for view in self.state.instances.values():
            if view.record.life not in known:
                log.info("instance_joined", extra={"instance": view.instance_id, "role": view.role})
        self.lifelines.keep(records)
        if self.scaling is not None:
            self.scaling.note_members(records)
        return records

    def _handle(self, event: events.SchedulerStateEvent) -> None:
        if self.scaling is not None and isinstance(event, events.PeerHeard):
            self.scaling.note_peer(event.message)
        self._carry_out(self.state.handle(event, asyncio.get_running_loop().time()))

    def _carry_out(self, commands: Sequence[events.SchedulerCommand]) -> None:
        for command in commands:
            match command:
                case events.ReadMembers():
                    self.is_read_due.set()
                case events.ReadPeer(scheduler_id, incarnation):
                    self.spawn(self.sharing.read(scheduler_id, incarnation))
                case events.EndWait(request_id, attempt):
                    if not self.turns.end(command):
                        self._handle(events.TaskUndelivered(request_id, attempt))
                case conclusion:
                    if isinstance(conclusion, events.AnnounceInstanceGone):
                        self.handing_over.end(InstanceLife(conclusion.instance_id, conclusion.incarnation))
                    self.announcer.announce(conclusion)
        self.sharing.tell()
        ready = sum(view.is_ready for view in self.state.instances.values())
        self.metrics.observe_mesh(ready, len(self.state.requests), len(self.state.waiting))
        self.metrics.observe_links(len(self.state.links.broken))
        timeline.count(OPEN_REQUESTS, len(self.state.requests))
