"""The scheduler's state in virtual time, as ``scheduler.service`` drives it, with a store beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.errors import BusError, BusTimeout, NoInstanceReady, RequestCancelled, RequestError
from common.ids import Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import (
    CancelRequest,
    GatewayGone,
    GenerationRequest,
    InstanceGone,
    InstanceLife,
    InstanceRecord,
    KVLinkFailed,
    KVLinkWorks,
    LeaveSequence,
    LengthPredicted,
    LoadReport,
    MemberRecord,
    Placement,
    PlaceMoved,
    Queued,
    RequestEnded,
    ResumeTask,
    SchedulerGone,
    SubmitRequest,
)
from common.messages.bookings import Booking, BookingsChanged, BookingsPage, ReadBookings
from scheduler import events
from scheduler.delivery import Delivery
from scheduler.policy.roles import RoleChange, RolePolicy
from scheduler.state import SchedulerState
from scheduler.turns import HOLD_S
from scheduler.workers import workers_of
from tests.virtual.bus import Bus, Reply

SCHEDULER = "scheduler"
"""All of them, as calls and words reach them."""
CALL_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
DISPATCH_ATTEMPTS = 3
MOST_BOOKINGS = 10_000
PREDICTED_WITHIN_S = 0.5
"""Before a short prompt is computed, or long after."""


@dataclass(slots=True)
class VirtualStore:
    """The dead stay in ``records`` until their lease is over, and in ``lives``."""

    records: dict[InstanceId, InstanceRecord] = field(default_factory=dict)
    lives: list[InstanceLife] = field(default_factory=list)
    gateway: MemberRecord | None = None


@dataclass(slots=True)
class VirtualScheduler:
    """One of those that share the subject. ``roles``: the policy by which it flips, while it leads."""

    name: str
    state: SchedulerState
    bus: Bus
    store: VirtualStore
    roles: RolePolicy | None = None
    flip: Callable[[RoleChange], None] = lambda _: None
    predict: Callable[[GenerationRequest], LengthDistribution] | None = None
    """What a predictor says of a request, some time after it is placed."""
    departures: int = 0
    """Sequences that were asked to leave."""
    held: dict[RequestId, Callable[[Placement | RequestError], None]] = field(default_factory=dict)
    beats: int = 0

    @property
    def is_alive(self) -> bool:
        return self.bus.nodes.get(self.name) is self

    @property
    def leads(self) -> bool:
        """The store's lease, as if it were never late: the first that is there and reaches the others."""
        there = [name for name in self.bus.hearing[SCHEDULER] if name in self.bus.nodes]
        return self.name == min(set(there) - self.bus.cut_off, default=None)

    def start(self) -> None:
        """Takes calls when it has read what the others know, or a while later."""
        self.beat()
        self.bus.clock.after(HEARTBEAT_S, self._serve)

    def _serve(self) -> None:
        if self.is_alive:
            self.bus.serving[SCHEDULER].append(self.name)

    def see_end(self, life: InstanceLife) -> None:
        """Of a process; or it seems so."""
        if self.is_alive and self.name not in self.bus.cut_off:
            self._handle(events.InstanceEnded(life))

    def reconnect(self) -> None:
        """The bus reaches it again."""
        if self.is_alive:
            self._handle(events.MessagesLost())
            self._handle(events.BusRestored())

    def beat(self) -> None:
        if not self.is_alive:
            return
        self.bus.clock.after(HEARTBEAT_S, self.beat)
        if self.name in self.bus.cut_off:
            return
        self._read_members()
        self._handle(events.TimePassed())
        self.beats += 1
        if self.beats == round(self.state.lease_s / HEARTBEAT_S) + 1:
            store = self.store
            present = {(each.instance_id, each.incarnation) for each in store.records.values()}
            departed = [life for life in store.lives if (life.instance_id, life.incarnation) not in present]
            self._handle(events.DepartedRead(tuple(departed)))
        self._tell(self.state.bookings.take_changes())
        if self.leads:
            self._handle(events.RebalanceDue())
            self._change_roles()

    def _change_roles(self) -> None:
        if self.roles is not None:
            change = self.roles.decide(workers_of(self.state), self.bus.clock.now)
            if change is not None:
                self.flip(change)

    def _tell(self, bookings: tuple[Booking, ...]) -> None:
        """What was placed and has not been told, or that it lives."""
        told = BookingsChanged(self.name, self.state.incarnation, self.state.bookings.changed, bookings)
        self.bus.publish(self.name, SCHEDULER, told)

    def _tell_changes(self) -> None:
        if bookings := self.state.bookings.take_changes():
            self._tell(bookings)

    def _read_peer(self, name: str, incarnation: Incarnation) -> None:
        def answer(reply: Reply) -> None:
            is_its = isinstance(reply, BookingsPage) and reply.incarnation == incarnation
            bookings = reply.bookings if is_its and isinstance(reply, BookingsPage) else None
            self._handle(events.PeerRead(incarnation, bookings))

        self.bus.call(self.name, name, ReadBookings(), answer, CALL_TIMEOUT_S)

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case LoadReport():
                self._handle(events.LoadReported(message))
            case RequestEnded():
                drew = (message.prompt_tokens, message.output_tokens, message.is_cut, message.attempt)
                measured = (message.ttft_s, message.tpot_s)
                self._handle(events.RequestOver(message.request_id, *drew, *measured))
            case KVLinkFailed() | KVLinkWorks():
                self._handle(events.LinkHeard(message))
            case BookingsChanged() if message.incarnation != self.state.incarnation:
                self._handle(events.PeerHeard(message))

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None:
        if isinstance(message, PlaceMoved):
            self._place_moved(message, reply)
            return
        if isinstance(message, ReadBookings):
            known, _ = self.state.bookings.read(None, MOST_BOOKINGS)
            reply(BookingsPage(self.state.incarnation, known, is_last=True))
            return
        assert isinstance(message, SubmitRequest)
        self._ask_length(message.request)
        for instance_id in message.lost_instances:
            self._handle(events.InstanceSuspected(instance_id))
        if self.state.settings.prefill_policy == "deferred" and not message.request.output_ids:
            self._wait_turn(message.request, reply)
        elif message.former is None:
            self._place(message.request, reply)
        else:
            self._resume(message.request, message.former, reply)

    def _ask_length(self, request: GenerationRequest) -> None:
        if self.predict is None:
            return
        chance, event = self.bus.chance, events.LengthPredicted(request, self.predict(request))
        self.bus.clock.after(chance.random() * PREDICTED_WITHIN_S, lambda: self._handle(event))

    def _place_moved(self, message: PlaceMoved, reply: Callable[[Reply], None]) -> None:
        try:
            placement = self.state.place_moved(
                message.request, message.former, self.bus.clock.now, message.wanted, message.refused
            )
        except RequestError as exc:
            reply(exc)
        else:
            self.state.check()
            self._tell_changes()
            self._carry_out(self.state.tell_length(message.request))
            reply(placement)

    def _wait_turn(self, request: GenerationRequest, reply: Callable[[Reply], None]) -> None:
        is_new = request.request_id not in self.state.waiting

        def end(outcome: Placement | RequestError) -> None:
            if isinstance(outcome, Placement):
                self._dispatch(Delivery(self.state, request, DISPATCH_ATTEMPTS, outcome), reply)
            else:
                reply(outcome)

        def ask_again() -> None:
            if self.is_alive and self.held.get(request.request_id) is end:
                del self.held[request.request_id]
                reply(Queued())
                self._handle(events.CallAnswered(request.request_id))

        self.held[request.request_id] = end
        try:
            commands = self.state.wait(request, self.bus.clock.now)
        except RequestError as exc:
            del self.held[request.request_id]
            reply(exc)
            return
        self._carry_out(commands)
        if is_new:
            ask_again()
        else:
            self.bus.clock.after(HOLD_S, ask_again)

    def _place(self, request: GenerationRequest, reply: Callable[[Reply], None]) -> None:
        self._dispatch(Delivery(self.state, request, DISPATCH_ATTEMPTS), reply)

    def _resume(
        self, request: GenerationRequest, former: InstanceLife, reply: Callable[[Reply], None]
    ) -> None:
        try:
            placement = self.state.place_resumed(request, self.bus.clock.now)
        except RequestError:
            self._place(request, reply)
            return
        self.state.check()
        self._tell_changes()
        decode = placement.decode_instance

        def answer(answered: Reply) -> None:
            if not isinstance(answered, RequestError | BusError):
                self._handle(events.TaskAcknowledged(request.request_id, request.attempt))
                reply(placement)
                return
            is_wanted = self.state.is_placed(request.request_id, request.attempt)
            self._handle(events.TaskUndelivered(request.request_id, request.attempt))
            if isinstance(answered, RequestCancelled) or not is_wanted:
                reply(RequestCancelled("ended while it was placed"))
            elif isinstance(answered, BusTimeout):
                self._handle(events.InstanceSuspected(decode))
                self.bus.publish(self.name, decode, CancelRequest(request.request_id, request.attempt))
                reply(NoInstanceReady("the decode instance did not answer"))
            else:
                self._place(request, reply)

        self.bus.call(self.name, decode, ResumeTask(request, former), answer, CALL_TIMEOUT_S)

    def _dispatch(self, delivery: Delivery, reply: Callable[[Reply], None]) -> None:
        request = delivery.request
        try:
            placement = delivery.place(self.bus.clock.now)
        except RequestError as exc:
            reply(exc)
            return
        self.state.check()
        self._tell_changes()
        prefill = placement.prefill_instance

        def answer(answered: Reply) -> None:
            if not isinstance(answered, RequestError | BusError):
                self._handle(delivery.succeed())
                reply(placement)
                return
            refused = answered if isinstance(answered, RequestError) else None
            happened, told = delivery.fail(placement, refused)
            for event in happened:
                self._handle(event)
            if isinstance(answered, BusTimeout):
                self.bus.publish(self.name, prefill, CancelRequest(request.request_id, request.attempt))
            if told is None:
                self._dispatch(delivery, reply)
            else:
                reply(told)

        self.bus.call(self.name, prefill, delivery.task(placement), answer, CALL_TIMEOUT_S)

    def _read_members(self) -> None:
        gateways = () if self.store.gateway is None else (self.store.gateway,)
        self._handle(events.MembersRead((*self.store.records.values(), *gateways)))

    def _handle(self, event: events.SchedulerStateEvent) -> None:
        if not self.is_alive:
            return
        self._carry_out(self.state.handle(event, self.bus.clock.now))

    def _carry_out(self, commands: list[events.SchedulerCommand]) -> None:
        self.state.check()
        for command in commands:
            match command:
                case events.ReadMembers():
                    self.bus.clock.after(0.01, self._read_members)
                case events.EndWait(request_id, attempt, outcome):
                    end = self.held.pop(request_id, None)
                    if end is None:
                        self._handle(events.TaskUndelivered(request_id, attempt))
                    else:
                        end(outcome)
                case events.AnnounceInstanceGone(instance_id, incarnation):
                    self.bus.publish_to_all(self.name, InstanceGone(instance_id, incarnation))
                case events.TellLength(decode_instance, request_id, attempt, lengths):
                    told = LengthPredicted(request_id, attempt, lengths)
                    self.bus.publish(self.name, decode_instance, told)
                case events.AskToLeave(departure):
                    self.departures += 1
                    left = departure.sequence
                    leave = LeaveSequence(left.request_id, left.attempt, departure.destination, epoch=1)
                    self.bus.publish(self.name, departure.source, leave)
                case events.AnnounceGatewayGone(gateway_id):
                    self.bus.publish_to_all(self.name, GatewayGone(gateway_id))
                case events.AnnounceSchedulerGone(name, incarnation):
                    self.bus.publish_to_all(self.name, SchedulerGone(name, incarnation))
                case events.ReadPeer(name, incarnation):
                    self._read_peer(name, incarnation)
        self._tell_changes()
