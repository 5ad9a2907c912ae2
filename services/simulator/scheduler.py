"""One scheduler in virtual time: its live state, driven as ``scheduler.service`` drives it.

What it is told and does nothing about, such as load reports, waits until somebody asks it something: then it
is taken in, as of when it came.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from common.config import Config
from common.errors import NoInstanceReady, Overloaded, RequestCancelled, RequestError
from common.ids import Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import (
    GenerationRequest,
    InstanceGone,
    KVLinkFailed,
    KVLinkWorks,
    LeaveSequence,
    LengthPredicted,
    LoadReport,
    MemberRecord,
    Placement,
    PlaceMoved,
    PrefillTask,
    RequestEnded,
)
from scheduler import events
from scheduler.policy.decode_binding import is_bound_late
from scheduler.policy.roles import RoleChange, RolePolicy, role_policy
from scheduler.state import SchedulerState
from scheduler.waiting_room import WaitingRoom
from scheduler.workers import workers_of
from services.simulator.instance import SimulatedInstance
from services.simulator.network import Network

Answer = Callable[[Placement | RequestError], None]
NO_ANSWER = "no prefill instance answered"
EPOCH = 1
"""One scheduler leads, for ever."""


class _Delivery(msgspec.Struct, eq=False):
    """Of a prompt to its prefill instance. ``excluded``: who was tried in vain before; ``attempts``: that are
    left with this one."""

    task: PrefillTask
    placement: Placement
    excluded: frozenset[InstanceId]
    attempts: int
    answer: Answer


class Instances(Protocol):
    """Whom the scheduler reaches."""

    network: Network

    def find(self, instance_id: InstanceId) -> SimulatedInstance | None: ...

    def tell(self, instance_id: InstanceId, word: msgspec.Struct) -> None: ...

    def members(self) -> tuple[MemberRecord, ...]:
        """As the store has them."""
        ...

    def tell_everyone(self, gone: InstanceGone) -> None: ...


class Listener(Protocol):
    """Who hears what a scheduler is told of requests, before its state does."""

    def note_submitted(self, request: GenerationRequest) -> None: ...

    def note_ended(self, ended: RequestEnded) -> None: ...


Predict = Callable[[GenerationRequest], LengthDistribution]


@dataclass(slots=True)
class SimulatedScheduler:
    """``predict``: what a predictor says of a request, ``predictor_s`` after it was placed."""

    config: Config
    mesh: Instances
    predict: Predict | None = None
    predictor_s: float = 0.0
    listener: Listener | None = None
    state: SchedulerState = field(init=False)
    roles: RolePolicy | None = field(init=False)
    changes: list[tuple[float, RoleChange]] = field(default_factory=list)
    asked_to_leave: int = 0
    _may_wait: bool = field(init=False)
    _held: dict[RequestId, Answer] = field(default_factory=dict)
    _mail: deque[tuple[float, int, events.SchedulerStateEvent]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        config, settings = self.config, self.config.scheduler
        self._may_wait = self.mesh.network.hop_s > 0 and settings.prefill_policy != "deferred"
        instance = config.instance
        self.state = SchedulerState(
            config.mesh.lease_s,
            settings,
            config.objectives,
            config.service_classes,
            incarnation=Incarnation("scheduler-1"),
            waiting=WaitingRoom(
                settings.max_deferred_requests,
                instance.prefill_order,
                instance.scheduling_window,
                instance.prefill_aging_tokens_per_s,
            ),
            are_rules_judged=False,
        )
        self.roles = role_policy(config.roles)

    def start(self) -> None:
        self.read_members()
        self._beat()
        if self.roles is not None:
            self._look()

    def read_members(self) -> None:
        self._handle(events.MembersRead(self.mesh.members()))

    def _beat(self) -> None:
        clock = self.mesh.network.clock
        self.read_members()
        self._handle(events.TimePassed())
        if self.config.scheduler.rebalance_decodes:
            self._handle(events.RebalanceDue())
        clock.after(self.config.mesh.heartbeat_s, self._beat)

    def _look(self) -> None:
        clock = self.mesh.network.clock
        assert self.roles is not None
        self.open_mail()
        change = self.roles.decide(workers_of(self.state), clock.now)
        if change is not None:
            self.changes.append((clock.now, change))
            self.mesh.network.tell(lambda: self._flip(change))
        clock.after(self.config.roles.look_s, self._look)

    def _flip(self, change: RoleChange) -> None:
        instance = self.mesh.find(change.instance_id)
        if instance is not None:
            instance.flip(change.role, keeps_home=change.keeps_home)

    # what is told

    def tell_report(self, report: LoadReport) -> None:
        view, network = self.state.instances.get(report.instance_id), self.mesh.network
        is_known = view is not None and view.record.incarnation == report.incarnation
        reported = events.LoadReported(report)
        if is_known and self._may_wait:
            self._mail.append((network.arrival_s(), network.clock.take_turn(), reported))
        else:
            network.tell(lambda: self._handle(reported))

    def tell_end(self, ended: RequestEnded) -> None:
        if self.listener is not None:
            self.mesh.network.tell(partial(self.listener.note_ended, ended))
        drew = (ended.prompt_tokens, ended.output_tokens, ended.is_cut, ended.attempt)
        over = events.RequestOver(ended.request_id, *drew, ended.ttft_s, ended.tpot_s)
        self._tell(over, can_wait=True)

    def tell_link(self, word: KVLinkFailed | KVLinkWorks) -> None:
        self._tell(events.LinkHeard(word), can_wait=True)

    def _tell(self, event: events.SchedulerStateEvent, *, can_wait: bool) -> None:
        """``can_wait``: it does nothing by itself, unless requests wait here for their turn."""
        network = self.mesh.network
        if can_wait and self._may_wait:
            clock = network.clock
            self._mail.append((network.arrival_s(), clock.take_turn(), event))
        else:
            network.tell(lambda: self._handle(event))

    def open_mail(self) -> None:
        """What has come by now."""
        mail, clock = self._mail, self.mesh.network.clock
        now, turn, handle = clock.now, clock.turn, self.state.handle
        while mail:
            came_s, came_turn, event = mail[0]
            if came_s > now or (came_s == now and came_turn >= turn):
                return
            mail.popleft()
            commands = handle(event, came_s)
            if commands:
                self._carry_out(commands)

    # what is asked

    def submit(self, request: GenerationRequest, lost: tuple[InstanceId, ...], answer: Answer) -> None:
        self.open_mail()
        if self.listener is not None:
            self.listener.note_submitted(request)
        for instance_id in lost:
            self._handle(events.InstanceSuspected(instance_id))
        if self.config.scheduler.prefill_policy == "deferred" and not request.output_ids:
            self._wait_turn(request, answer)
        else:
            attempts = self.config.scheduler.dispatch_attempts
            self._dispatch(request, frozenset(), attempts, NoInstanceReady(NO_ANSWER), answer)

    def place_moved(self, call: PlaceMoved, answer: Answer) -> None:
        self.open_mail()
        now = self.mesh.network.clock.now
        reply: Placement | RequestError
        try:
            reply = self.state.place_moved(call.request, call.former, now, call.wanted, call.refused)
        except RequestError as exc:
            reply = exc
        else:
            self._carry_out(self.state.tell_length(call.request))
        self.mesh.network.tell(lambda: answer(reply))

    def _wait_turn(self, request: GenerationRequest, answer: Answer) -> None:
        """Live its gateway asks again and again, which keeps its place: here its call stays."""

        def end(outcome: Placement | RequestError) -> None:
            if isinstance(outcome, Placement):
                attempts = self.config.scheduler.dispatch_attempts
                self._dispatch(request, frozenset(), attempts, NoInstanceReady(NO_ANSWER), answer, outcome)
            else:
                self.mesh.network.tell(lambda: answer(outcome))

        self._held[request.request_id] = end
        try:
            commands = self.state.wait(request, self.mesh.network.clock.now)
        except RequestError as exc:
            refusal = exc
            del self._held[request.request_id]
            self.mesh.network.tell(lambda: answer(refusal))
            return
        self._carry_out(commands)

    def _dispatch(
        self,
        request: GenerationRequest,
        excluded: frozenset[InstanceId],
        attempts: int,
        refusal: RequestError,
        answer: Answer,
        bound: Placement | None = None,
    ) -> None:
        """Places it and hands it over; where it is not taken, again without that instance."""
        network = self.mesh.network
        try:
            if attempts == 0:
                raise refusal
            placement = bound or self.state.place(request, network.clock.now, excluded)
        except RequestError as exc:
            told = refusal if excluded and isinstance(exc, NoInstanceReady) else exc
            network.tell(lambda: answer(told))
            return
        if self.predict is not None and self.state.placer.predicted.find(request.request_id) is None:
            said = events.LengthPredicted(request, self.predict(request))
            network.clock.after(self.predictor_s, lambda: self._handle(said))
        delivery = _Delivery(self._task(request, placement), placement, excluded, attempts, answer)
        network.tell(partial(self._deliver, delivery))

    def _deliver(self, delivery: _Delivery) -> None:
        instance = self.mesh.find(delivery.placement.prefill_instance)
        refused: RequestError | None = None
        if instance is None:
            refused = NoInstanceReady(NO_ANSWER)
        else:
            try:
                instance.take_prompt(delivery.task)
            except RequestError as exc:
                refused = exc
        is_there = instance is not None
        self.mesh.network.tell(lambda: self._end_delivery(delivery, refused, is_there=is_there))

    def _end_delivery(self, delivery: _Delivery, refused: RequestError | None, *, is_there: bool) -> None:
        request, placement, answer = delivery.task.request, delivery.placement, delivery.answer
        self.open_mail()
        if refused is None:
            self._handle(events.TaskAcknowledged(request.request_id, request.attempt))
            answer(placement)
            return
        is_wanted = self.state.is_placed(request.request_id, request.attempt)
        self._handle(events.TaskUndelivered(request.request_id, request.attempt))
        if not isinstance(refused, Overloaded | NoInstanceReady):
            answer(refused)
            return
        if not is_there:
            self._handle(events.InstanceSuspected(placement.prefill_instance))
        if not is_wanted:
            answer(RequestCancelled("ended while it was placed"))
            return
        others = delivery.excluded | {placement.prefill_instance}
        self._dispatch(request, others, delivery.attempts - 1, refused, answer)

    def _task(self, request: GenerationRequest, placement: Placement) -> PrefillTask:
        decode, binding = placement.decode_instance, self.config.scheduler.decode_binding
        is_late = is_bound_late(binding, placement.prefill_instance, decode)
        lengths = self.state.placer.predict(request)
        return PrefillTask(request, decode, placement.decode_incarnation, lengths, is_late)

    # commands

    def _handle(self, event: events.SchedulerStateEvent) -> None:
        if self._mail:
            self.open_mail()
        self._carry_out(self.state.handle(event, self.mesh.network.clock.now))

    def _carry_out(self, commands: list[events.SchedulerCommand]) -> None:
        for command in commands:
            match command:
                case events.ReadMembers():
                    self.mesh.network.tell(self.read_members)
                case events.EndWait(request_id, attempt, outcome):
                    end = self._held.pop(request_id, None)
                    if end is None:
                        self._handle(events.TaskUndelivered(request_id, attempt))
                    else:
                        end(outcome)
                case events.AnnounceInstanceGone(instance_id, incarnation):
                    self.mesh.tell_everyone(InstanceGone(instance_id, incarnation))
                case events.TellLength(decode_instance, request_id, attempt, lengths):
                    self.mesh.tell(decode_instance, LengthPredicted(request_id, attempt, lengths))
                case events.AskToLeave(departure):
                    self.asked_to_leave += 1
                    left = departure.sequence
                    leave = LeaveSequence(left.request_id, left.attempt, departure.destination, EPOCH)
                    self.mesh.tell(departure.source, leave)
                case events.AnnounceGatewayGone() | events.AnnounceSchedulerGone() | events.ReadPeer():
                    raise AssertionError(f"{command}: gateway and scheduler stay")
