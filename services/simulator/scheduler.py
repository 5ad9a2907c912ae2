"""A scheduler in virtual time: its live state, driven as ``scheduler.service`` drives it.

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
from common.errors import RequestError
from common.ids import Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import (
    GenerationRequest,
    InstanceGone,
    InstanceLife,
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
from common.messages.bookings import Booking, BookingsChanged
from scheduler import events
from scheduler.delivery import Delivery
from scheduler.policy.roles import RoleChange, RolePolicy, role_policy
from scheduler.state import SchedulerState
from scheduler.waiting_room import WaitingRoom
from scheduler.workers import workers_of
from services.simulator.history import History
from services.simulator.instance import SimulatedInstance
from services.simulator.network import Network

Answer = Callable[[Placement | RequestError], None]
EPOCH = 1
"""One scheduler leads, for ever."""
ALL_BOOKINGS = 1 << 31
"""Live they are read in pages."""


class Instances(Protocol):
    """Whom the scheduler reaches."""

    network: Network
    history: History

    def find(self, instance_id: InstanceId) -> SimulatedInstance | None: ...

    def tell(self, instance_id: InstanceId, word: msgspec.Struct) -> None: ...

    def members(self) -> tuple[MemberRecord, ...]:
        """As the store has them."""
        ...

    def tell_everyone(self, gone: InstanceGone) -> None: ...


class Listener(Protocol):
    """Who hears what a scheduler is told of requests, before its state does."""

    def note_submitted(self, request: GenerationRequest) -> None: ...

    def note_peer(self, message: BookingsChanged) -> None: ...

    def note_ended(self, ended: RequestEnded) -> None: ...


Predict = Callable[[GenerationRequest], LengthDistribution]


@dataclass(slots=True)
class SimulatedScheduler:
    """``predict``: what a predictor says of a request, ``predictor_s`` after it was placed. ``peers``: the
    other schedulers, who hear of what is booked here (``scheduler.sharing``)."""

    config: Config
    mesh: Instances = field(repr=False)
    name: str
    is_leader: bool
    predict: Predict | None = None
    predictor_s: float = 0.0
    listener: Listener | None = None
    state: SchedulerState = field(init=False)
    roles: RolePolicy | None = field(init=False)
    asked_to_leave: int = 0
    peers: "tuple[SimulatedScheduler, ...]" = ()
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
            incarnation=Incarnation(self.name),
            waiting=WaitingRoom(
                settings.max_deferred_requests,
                instance.prefill_order,
                instance.scheduling_window,
                instance.prefill_aging_tokens_per_s,
            ),
            are_rules_judged=False,
        )
        self.roles = role_policy(config.roles) if self.is_leader else None

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
        if self.peers:
            self._share(self.state.bookings.take_changes())
        if self.config.scheduler.rebalance_decodes and self.is_leader:
            self._handle(events.RebalanceDue())
        clock.after(self.config.mesh.heartbeat_s, self._beat)

    def _look(self) -> None:
        clock = self.mesh.network.clock
        assert self.roles is not None
        self.open_mail()
        change = self.roles.decide(workers_of(self.state), clock.now)
        if change is not None:
            self.mesh.network.tell(lambda: self._flip(change))
        clock.after(self.config.roles.look_s, self._look)

    def _flip(self, change: RoleChange) -> None:
        instance = self.mesh.find(change.instance_id)
        if instance is not None and instance.flip(change.role, keeps_home=change.keeps_home):
            self.mesh.history.note("role", change.instance_id, f"{change.role}: {change.reason}")

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

    def tell_ended(self, life: InstanceLife) -> None:
        self._tell(events.InstanceEnded(life), can_wait=False)

    def tell_link(self, word: KVLinkFailed | KVLinkWorks) -> None:
        self._tell(events.LinkHeard(word), can_wait=True)

    def tell_bookings(self, message: BookingsChanged) -> None:
        """Another one's."""
        if self.listener is not None:
            self.mesh.network.tell(partial(self.listener.note_peer, message))
        self._tell(events.PeerHeard(message), can_wait=True)

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
            self._dispatch(self._delivery(request), answer)

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
            self._share_changes()
        self.mesh.network.tell(lambda: answer(reply))

    def _wait_turn(self, request: GenerationRequest, answer: Answer) -> None:
        """Live its gateway asks again and again, which keeps its place: here its call stays."""

        def end(outcome: Placement | RequestError) -> None:
            if isinstance(outcome, Placement):
                self._dispatch(self._delivery(request, outcome), answer)
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

    def _delivery(self, request: GenerationRequest, bound: Placement | None = None) -> Delivery:
        return Delivery(self.state, request, self.config.scheduler.dispatch_attempts, bound)

    def _dispatch(self, delivery: Delivery, answer: Answer) -> None:
        """Places it and hands it over; where it is not taken, again without that instance."""
        network, request = self.mesh.network, delivery.request
        try:
            placement = delivery.place(network.clock.now)
        except RequestError as exc:
            refusal = exc
            self._share_changes()
            network.tell(lambda: answer(refusal))
            return
        self._share_changes()
        if self.predict is not None and self.state.placer.predicted.find(request.request_id) is None:
            said = events.LengthPredicted(request, self.predict(request))
            network.clock.after(self.predictor_s, lambda: self._handle(said))
        task = delivery.task(placement)
        network.tell(lambda: self._deliver(delivery, task, placement, answer))

    def _deliver(self, delivery: Delivery, task: PrefillTask, placement: Placement, answer: Answer) -> None:
        instance = self.mesh.find(placement.prefill_instance)
        refused: RequestError | None = None
        is_taken = False
        if instance is not None:
            try:
                instance.take_prompt(task)
                is_taken = True
            except RequestError as exc:
                refused = exc
        if is_taken:
            self.mesh.network.tell(lambda: self._acknowledge(delivery, placement, answer))
        else:
            self.mesh.network.tell(lambda: self._fail(delivery, placement, refused, answer))

    def _acknowledge(self, delivery: Delivery, placement: Placement, answer: Answer) -> None:
        self._handle(delivery.succeed())
        answer(placement)

    def _fail(
        self, delivery: Delivery, placement: Placement, refused: RequestError | None, answer: Answer
    ) -> None:
        self.open_mail()
        happened, told = delivery.fail(placement, refused)
        for event in happened:
            self._handle(event)
        if told is None:
            self._dispatch(delivery, answer)
        else:
            answer(told)

    # commands

    def _handle(self, event: events.SchedulerStateEvent) -> None:
        if self._mail:
            self.open_mail()
        self._carry_out(self.state.handle(event, self.mesh.network.clock.now))
        self._share_changes()

    # the others

    def _share_changes(self) -> None:
        """What has changed since the last time, if there is anybody to hear it."""
        if self.peers:
            bookings = self.state.bookings.take_changes()
            if bookings:
                self._share(bookings)

    def _share(self, bookings: tuple[Booking, ...]) -> None:
        state = self.state
        message = BookingsChanged(self.name, state.incarnation, state.bookings.changed, bookings)
        for each in self.peers:
            each.tell_bookings(message)

    def _read(self, name: str) -> None:
        """All that another one knows, when the question has reached it and its answer has come."""
        [peer] = [each for each in self.peers if each.name == name]
        network = self.mesh.network

        def answer() -> None:
            peer.open_mail()
            bookings, _ = peer.state.bookings.read(None, ALL_BOOKINGS)
            network.tell(lambda: self._handle(events.PeerRead(peer.state.incarnation, bookings)))

        network.tell(answer)

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
                case events.ReadPeer(name, _):
                    self._read(name)
                case events.AnnounceGatewayGone() | events.AnnounceSchedulerGone():
                    raise AssertionError(f"{command}: gateway and schedulers stay")
