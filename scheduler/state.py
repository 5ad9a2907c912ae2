"""What the scheduler knows of the mesh, and what it decides from it.

``state.handle(event, now) -> [command]``: no clock, no IO. Membership comes from two sides: records under
leases in the store say *what* an instance is, its load reports say *that* it lives (every 100 ms or on
change; TetriInfer 3.2). So losing the store stops nothing that runs, and a silent instance is gone after
``lease_s`` whatever the store says.

A placement counts against its instances from the moment it is made: pending tokens are what the last
report said plus what was sent there since. A report that was sent after a task was acknowledged contains
it, because one connection's messages keep their order.

Several schedulers may run. Each knows the bookings of all (``scheduler.bookings``, ``scheduler.peers``).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from common.config import ObjectivesConfig, SchedulerConfig
from common.errors import (
    ContextLengthExceeded,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import (
    GenerationRequest,
    InstanceLife,
    InstanceRecord,
    LoadReport,
    MemberRecord,
    Placement,
    ServiceRecord,
    has_phase,
)
from common.messages.bookings import Booking, BookingVersion
from scheduler.bookings import Bookings
from scheduler.events import (
    AnnounceGatewayGone,
    AnnounceInstanceGone,
    AskToLeave,
    BusRestored,
    CallAnswered,
    DepartedRead,
    EndWait,
    InstanceSuspected,
    LengthPredicted,
    LoadReported,
    MembersRead,
    MessagesLost,
    PeerHeard,
    PeerRead,
    ReadMembers,
    RebalanceDue,
    RequestOver,
    SchedulerCommand,
    SchedulerStateEvent,
    TaskAcknowledged,
    TaskUndelivered,
    TellLength,
    TimePassed,
)
from scheduler.learned_times import LearnedTimes
from scheduler.overdue import find_overdue
from scheduler.peers import Peers
from scheduler.placing import Placer
from scheduler.policy.decode_rebalancing import choose_departures
from scheduler.policy.grouping import Groups
from scheduler.views import InstanceView, PlacedRequest
from scheduler.waiting_room import WaitingRoom

MOST_WAITING = 1024
"""Where nothing else is said."""
STALE_AFTER_S = 5.0
"""A hand-over is in nobody's report for a moment. A booking of so long ago, on instances that both report no
work at all, is of a request whose end was never heard."""


@dataclass(slots=True)
class SchedulerState:
    """Instances, gateways and the requests that any scheduler has placed. Bounded by the queue bounds.

    ``incarnation`` is this scheduler's own.
    ``gateways`` maps to the time since which the store lacks the gateway's record; None: it is there.
    """

    lease_s: float
    settings: SchedulerConfig = field(default_factory=SchedulerConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    service_classes: Mapping[str, ObjectivesConfig] = field(default_factory=dict)
    instances: dict[InstanceId, InstanceView] = field(default_factory=dict)
    gateways: dict[GatewayId, float | None] = field(default_factory=dict)
    learned: LearnedTimes = field(default_factory=LearnedTimes)
    incarnation: Incarnation = field(default=Incarnation(""))
    bookings: Bookings = field(init=False)
    peers: Peers = field(init=False)
    waiting: WaitingRoom = field(default_factory=lambda: WaitingRoom(MOST_WAITING))
    placer: Placer = field(init=False)
    groups: Groups = field(init=False)

    def __post_init__(self) -> None:
        self.bookings = Bookings(self.incarnation, self.instances)
        self.peers = Peers(self.lease_s, self.bookings)
        self.groups = Groups(self.incarnation)
        self.placer = Placer(self.settings, self.objectives, self.instances, self.service_classes)

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        self.bookings.check()
        self.waiting.check()
        for view in self.instances.values():
            view.check()

    def handle(self, event: SchedulerStateEvent, now: float) -> list[SchedulerCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        self.bookings.pass_time(now)
        return self._take(event, now) + self._bind(now)

    def _take(self, event: SchedulerStateEvent, now: float) -> list[SchedulerCommand]:
        match event:
            case MembersRead(records):
                return self._read_members(records, now)
            case DepartedRead(lives):
                return self._tell_departed(lives)
            case LoadReported(report):
                return self._take_report(report, now)
            case TaskAcknowledged(request_id, attempt):
                if self.is_placed(request_id, attempt):
                    self._acknowledge(request_id, now)
            case PeerHeard(message):
                commands = self.peers.hear(message, now)
                return commands + self._learn(message.bookings)
            case PeerRead(incarnation, bookings):
                self.peers.take_all(incarnation, bookings, now)
                return self._learn(bookings or ())
            case MessagesLost():
                return self.peers.ask_all()
            case InstanceSuspected(instance_id):
                if view := self.instances.get(instance_id):
                    view.is_suspect = True
            case TaskUndelivered(request_id, attempt):
                if self.is_placed(request_id, attempt):
                    self.bookings.unbook(request_id)
            case RequestOver(request_id, attempt=attempt):
                self._end(event)
                return self._stop_waiting(request_id, attempt)
            case LengthPredicted(request, lengths):
                return self._expect(request, lengths)
            case CallAnswered(request_id):
                self.waiting.note_answered(request_id, now)
            case TimePassed():
                self.waiting.forget_unasked(now)
                return self._notice_silence(now)
            case RebalanceDue():
                return self._rebalance()
            case BusRestored():
                for view in self.instances.values():
                    view.last_heard_s = now
                self.peers.excuse(now)
                return self.peers.ask_all()
        return []

    def wait(self, request: GenerationRequest, now: float, waited_s: float = 0.0) -> list[SchedulerCommand]:
        """A call is held for the request until its turn has come (``EndWait``): at once, where nobody is
        before it and an instance has hardly anything to do. Raises Overloaded or RequestCancelled."""
        self._supersede(request)
        try:
            self.waiting.enter(request, now, waited_s)
        except Overloaded as exc:
            raise Overloaded(exc.message, retry_after_s=self.placer.next_turn_retry_s()) from None
        return self._bind(now)

    def _bind(self, now: float) -> list[SchedulerCommand]:
        """Those whose turn it is, as long as there are instances for them."""
        commands: list[SchedulerCommand] = []
        while (
            len(self.waiting)
            and self.placer.has_short_queue()
            and (request := self.waiting.next_in_turn(now)) is not None
        ):
            outcome: Placement | RequestError
            try:
                outcome = self.place(request, now, is_patient=True)
            except Overloaded:
                break
            except RequestError as exc:
                outcome = exc
            self.waiting.leave(request.request_id)
            commands.append(EndWait(request.request_id, request.attempt, outcome))
        return commands

    def _stop_waiting(self, request_id: RequestId, attempt: int) -> list[SchedulerCommand]:
        waiting = self.waiting.find(request_id)
        if waiting is None or waiting.attempt > attempt:
            return []
        self.waiting.leave(request_id)
        return [EndWait(request_id, waiting.attempt, RequestCancelled(f"request {request_id} has ended"))]

    def place(
        self,
        request: GenerationRequest,
        now: float,
        excluded: frozenset[InstanceId] = frozenset(),
        *,
        is_patient: bool = False,
    ) -> Placement:
        """Chooses both instances and books the request on them. Who is patient takes no long queue.

        ``excluded``: instances that were just tried in vain. Raises Overloaded, NoInstanceReady or
        ContextLengthExceeded; then nothing is booked.
        """
        self._supersede(request)
        both = self._choose_both(request, excluded, now, is_patient=is_patient)
        prefill, decode = (view.record for view in both)
        return self._book(
            request,
            Placement(prefill.instance_id, prefill.incarnation, decode.instance_id, decode.incarnation),
        )

    def place_resumed(self, request: GenerationRequest, now: float) -> Placement:
        """Chooses a decode instance for a sequence whose KV need not be computed, and books it there alone.

        Raises as ``place``.
        """
        self._supersede(request)
        decode = self.placer.choose_decode(request, now).record
        life = (decode.instance_id, decode.incarnation)
        return self._book(request, Placement(*life, *life))

    def place_moved(
        self,
        request: GenerationRequest,
        former: InstanceLife,
        now: float,
        wanted: InstanceId | None = None,
        refused: InstanceId | None = None,
    ) -> Placement:
        """Chooses another decode instance for a computed sequence, and books it there: as if it were booked
        nowhere yet. One that is not booked
        stays so: its end has been heard.

        Raises as ``place``.
        """
        view = self.instances.get(former.instance_id)
        if view is None or view.record.incarnation != former.incarnation:
            raise NoInstanceReady(f"{former.instance_id} is not known yet, or is gone")
        with self.bookings.uncounted(request.request_id):
            decode = self.placer.choose_decode(request, now, view, wanted, refused).record
        placement = Placement(former.instance_id, former.incarnation, decode.instance_id, decode.incarnation)
        known = self.requests.get(request.request_id)
        if known is not None and known.attempt == request.attempt and not known.is_void:
            # It is computed, so it was delivered, whether or not its deliverer has said so yet.
            self._book(request, placement, known.deliverer, acknowledged_s=now)
        return placement

    @property
    def requests(self) -> dict[RequestId, PlacedRequest]:
        """Those that are booked, by whichever scheduler."""
        return self.bookings.requests

    # balance

    def _rebalance(self) -> list[SchedulerCommand]:
        most = self.settings.max_requests_per_decode
        workers = [
            view.as_decode_worker(most)
            for view in self.instances.values()
            if has_phase(view.role, "decode") and view.report is not None
        ]
        return [AskToLeave(departure) for departure in choose_departures(workers)]

    # placing

    def _choose_both(
        self, request: GenerationRequest, excluded: frozenset[InstanceId], now: float, *, is_patient: bool
    ) -> tuple[InstanceView, InstanceView]:
        """Of this scheduler's own group, if there are groups and it has somebody for the request."""
        if self.settings.grouped and self.peers.known:
            instances = ((view.role, view.record.instance_id) for view in self.instances.values())
            others = self.groups.others(instances, self.peers.known)
            with suppress(Overloaded, NoInstanceReady, ContextLengthExceeded):
                return self.placer.choose_both(request, excluded | others, now, is_patient=is_patient)
        return self.placer.choose_both(request, excluded, now, is_patient=is_patient)

    def _supersede(self, request: GenerationRequest) -> None:
        self.bookings.check_wanted(request.request_id, request.attempt)
        if request.request_id in self.requests:
            self.bookings.unbook(request.request_id)

    def _book(
        self,
        request: GenerationRequest,
        placement: Placement,
        deliverer: Incarnation | None = None,
        acknowledged_s: float | None = None,
    ) -> Placement:
        placed = PlacedRequest(
            placement,
            BookingVersion.NONE,
            request.gateway_id,
            request.tokens,
            deliverer or self.incarnation,
            acknowledged_s=acknowledged_s,
            is_reported=acknowledged_s is not None,
            predicted=self.placer.predicted.find(request.request_id),
        )
        placed.expect(self.placer.predict(request), len(request.output_ids))
        self.bookings.book(request.request_id, request.attempt, placed)
        return placement

    def _expect(self, request: GenerationRequest, lengths: LengthDistribution) -> list[SchedulerCommand]:
        """Later attempts at the request are placed by it, too. Of one that is over nobody wants to know."""
        placed = self.requests.get(request.request_id)
        if placed is None or placed.attempt != request.attempt:
            return []
        self.placer.predicted.keep(request.request_id, lengths)
        placed.predicted = lengths
        if placed.is_void:
            return []
        expected = self.placer.predict(request)
        self.bookings.expect(request.request_id, placed, expected, len(request.output_ids))
        decode = placed.placement.decode_instance
        return [TellLength(decode, request.request_id, request.attempt, expected)]

    def tell_length(self, request: GenerationRequest) -> list[SchedulerCommand]:
        """What the predictor said of it, to where it is to be decoded now."""
        placed = self.requests.get(request.request_id)
        if placed is None or placed.is_void or self.placer.predicted.find(request.request_id) is None:
            return []
        decode, expected = placed.placement.decode_instance, self.placer.predict(request)
        return [TellLength(decode, request.request_id, request.attempt, expected)]

    def _learn(self, bookings: Iterable[Booking]) -> list[SchedulerCommand]:
        """What others' predictor said: later attempts may be placed here. Whose turn has come elsewhere has
        none here."""
        commands: list[SchedulerCommand] = []
        for booking in bookings:
            if booking.booked is None:
                continue
            commands += self._stop_waiting(booking.request_id, booking.version.attempt)
            if booking.booked.predicted is not None and booking.request_id in self.requests:
                self.placer.predicted.keep(booking.request_id, booking.booked.predicted)
        return commands

    def _acknowledge(self, request_id: RequestId, now: float) -> None:
        """Of a void placement the gateway hears that its instance is gone, and submits it again."""
        placed = self.requests[request_id]
        if placed.is_void:
            self.bookings.unbook(request_id)
        else:
            placed.acknowledged_s = now
            self.bookings.note_changed(request_id, placed)

    def _end(self, over: RequestOver) -> None:
        """What it drew says what others will, unless its client cut it short."""
        self.bookings.end(over.request_id, over.attempt)
        if over.request_id not in self.requests:
            self.placer.predicted.forget(over.request_id)
        if over.output_tokens is not None:
            self.placer.lengths.add(over.prompt_tokens, over.output_tokens, is_cut=over.is_cut)
            ended = self.placer.log.end(over.request_id, over.output_tokens, over.ttft_s, over.tpot_s)
            if ended is not None:
                self.placer.regret.compare(ended)

    # membership

    def _read_members(self, records: tuple[MemberRecord, ...], now: float) -> list[SchedulerCommand]:
        commands: list[SchedulerCommand] = []
        present: set[GatewayId] = set()
        for record in records:
            match record:
                case ServiceRecord(kind="gateway"):
                    present.add(GatewayId(record.service_id))
                case InstanceRecord():
                    view = self.instances.get(record.instance_id)
                    if view is None:
                        self._add(record, now)
                    elif view.record.incarnation == record.incarnation:
                        view.record = record
                        self.groups.forget()
                    else:
                        commands.append(self._remove(view))
                        self._add(record, now)
                case _:
                    continue
        return commands + self._notice_absent_gateways(present, now)

    def _tell_departed(self, lives: Iterable[InstanceLife]) -> list[SchedulerCommand]:
        """Of those who are not heard. They died while no scheduler lived that knew them."""
        commands: list[SchedulerCommand] = []
        for life in lives:
            view = self.instances.get(life.instance_id)
            if view is None or view.record.incarnation != life.incarnation:
                commands.append(AnnounceInstanceGone(life.instance_id, life.incarnation))
        return commands

    def _add(self, record: InstanceRecord, now: float) -> None:
        view = self.instances[record.instance_id] = InstanceView(record, now)
        self.groups.forget()
        self.bookings.count_known(view)

    def _notice_absent_gateways(self, present: set[GatewayId], now: float) -> list[SchedulerCommand]:
        """A gateway is gone once successful reads have lacked it for a whole lease: a store that was
        emptied, or was away, gives it that long to re-assert itself. One that is only known by another
        scheduler's word of its requests may have gone before the first read."""
        for gateway_id in present:
            self.gateways[gateway_id] = None
        commands: list[SchedulerCommand] = []
        booked = {placed.gateway_id for placed in self.requests.values()}
        for gateway_id in (self.gateways.keys() | booked) - present:
            absent_since_s = self.gateways.get(gateway_id)
            if absent_since_s is None:
                self.gateways[gateway_id] = now
            elif now - absent_since_s > self.lease_s:
                commands.append(self._remove_gateway(gateway_id))
        return commands

    def _take_report(self, report: LoadReport, now: float) -> list[SchedulerCommand]:
        view = self.instances.get(report.instance_id)
        if view is None or view.record.incarnation != report.incarnation:
            return [ReadMembers()]
        if view.report is not None and report.sequence <= view.report.sequence:
            return []
        if report.role != view.role:
            self.groups.forget()
        view.take_report(self.learned.complete(view.record, report), now)
        for request_id in view.placed:
            placed = self.requests[request_id]
            is_acknowledged = placed.acknowledged_s is not None
            if is_acknowledged and placed.placement.prefill_instance == report.instance_id:
                view.note_reported(placed)
        if view.is_idle:
            self._forget_stale(view, now)
        return []

    def _forget_stale(self, view: InstanceView, now: float) -> None:
        for request_id in list(view.placed):
            placed = self.requests[request_id]
            both = (placed.placement.prefill_instance, placed.placement.decode_instance)
            views = [self.instances.get(instance_id) for instance_id in both]
            is_idle = all(each is None or each.is_idle for each in views)
            if is_idle and placed.acknowledged_s is not None and now - placed.acknowledged_s > STALE_AFTER_S:
                self.bookings.drop(request_id)

    def is_placed(self, request_id: RequestId, attempt: int) -> bool:
        """Whether the booking of that attempt from here stands: nobody ended or replaced it."""
        placed = self.requests.get(request_id)
        return placed is not None and placed.attempt == attempt and placed.deliverer == self.incarnation

    def _notice_silence(self, now: float) -> list[SchedulerCommand]:
        commands = self.peers.notice_silence(now)
        for view in list(self.instances.values()):
            if now - view.last_heard_s > self.lease_s:
                commands.append(self._remove(view))
        reported_s = now - max(STALE_AFTER_S, self.lease_s)
        for request_id in find_overdue(self.requests, self.instances.values(), reported_s):
            self.bookings.drop(request_id)
        return commands

    def _remove(self, view: InstanceView) -> AnnounceInstanceGone:
        for request_id in list(view.placed):
            placed = self.requests[request_id]
            if placed.acknowledged_s is None:
                self.bookings.void(request_id)
            else:
                self.bookings.drop(request_id)
        del self.instances[view.record.instance_id]
        self.groups.forget()
        return AnnounceInstanceGone(view.record.instance_id, view.record.incarnation)

    def _remove_gateway(self, gateway_id: GatewayId) -> AnnounceGatewayGone:
        del self.gateways[gateway_id]
        self.waiting.leave_gateway(gateway_id)
        for request_id, placed in list(self.requests.items()):
            if placed.gateway_id == gateway_id:
                self.bookings.drop(request_id)
        return AnnounceGatewayGone(gateway_id)
