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
from common.ids import Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages import (
    GenerationRequest,
    InstanceLife,
    MemberRecord,
    Placement,
    has_phase,
)
from common.messages.bookings import Booking, BookingVersion
from scheduler.bookings import Bookings
from scheduler.events import (
    AnnounceGatewayGone,
    AskToLeave,
    BookingsRead,
    BusRestored,
    CallAnswered,
    DepartedRead,
    EndWait,
    InstanceEnded,
    InstanceSuspected,
    LengthPredicted,
    LinkHeard,
    LoadReported,
    MembersRead,
    MessagesLost,
    PeerHeard,
    PeerRead,
    RebalanceDue,
    RequestOver,
    SchedulerCommand,
    SchedulerStateEvent,
    TaskAcknowledged,
    TaskUndelivered,
    TellLength,
    TimePassed,
)
from scheduler.kv_links import KVLinks
from scheduler.membership import Membership
from scheduler.peers import Peers
from scheduler.placing import Placer
from scheduler.policy.decode_rebalancing import choose_departures
from scheduler.policy.dispatch import BY_SEQUENCE
from scheduler.policy.grouping import Groups
from scheduler.standby import Standby
from scheduler.views import InstanceView, PlacedRequest, Standing
from scheduler.waiting_room import WaitingRoom

MOST_WAITING = 1024
"""Where nothing else is said."""


@dataclass(slots=True)
class SchedulerState:
    """Instances, gateways and the requests that any scheduler has placed. Bounded by the queue bounds.

    ``incarnation`` is this scheduler's own. ``are_rules_judged``: those that do not decide are asked what
    they would have done, too (``scheduler.regret``).
    """

    lease_s: float
    settings: SchedulerConfig = field(default_factory=SchedulerConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    service_classes: Mapping[str, ObjectivesConfig] = field(default_factory=dict)
    instances: dict[InstanceId, InstanceView] = field(default_factory=dict)
    incarnation: Incarnation = field(default=Incarnation(""))
    bookings: Bookings = field(init=False)
    peers: Peers = field(init=False)
    waiting: WaitingRoom = field(default_factory=lambda: WaitingRoom(MOST_WAITING))
    placer: Placer = field(init=False)
    groups: Groups = field(init=False)
    members: Membership = field(init=False)
    links: KVLinks = field(default_factory=KVLinks)
    are_rules_judged: bool = True

    def __post_init__(self) -> None:
        self.bookings = Bookings(self.incarnation, self.instances)
        self.peers = Peers(self.lease_s, self.bookings)
        self.groups = Groups(self.incarnation)
        standing = Standing()
        standby = Standby(self.instances, standing)
        self.placer = Placer(self.settings, self.objectives, standby, self.links, self.service_classes)
        self.members = Membership(
            self.lease_s, self.instances, self.bookings, self.groups, self.links, standing
        )
        rules = {self.settings.prefill_policy, self.settings.decode_policy}
        self.members.are_sequences_asked = self.are_rules_judged or not BY_SEQUENCE.isdisjoint(rules)

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        self.bookings.check()
        self.waiting.check()
        self.placer.standby.check()
        self.links.check()
        for view in self.instances.values():
            view.check()

    def handle(self, event: SchedulerStateEvent, now: float) -> list[SchedulerCommand]:
        """Takes an event in and says what to do. ``now``: seconds, monotonic."""
        self.bookings.pass_time(now)
        commands = self._take(event, now)
        return commands + self._bind(now) if len(self.waiting) else commands

    def _take(self, event: SchedulerStateEvent, now: float) -> list[SchedulerCommand]:
        match event:
            # The commonest comes first.
            case LoadReported(report):
                return self.members.take_report(report, now)
            case MembersRead(records):
                return self._read_members(records, now)
            case DepartedRead(lives):
                return self.members.tell_departed(lives)
            case TaskAcknowledged(request_id, attempt):
                if self.is_placed(request_id, attempt):
                    self._acknowledge(request_id, now)
            case PeerHeard(message):
                commands = self.peers.hear(message, now)
                return commands + self._learn(message.bookings)
            case PeerRead(incarnation, bookings):
                self.peers.take_all(incarnation, bookings, now)
                return self._learn(bookings or ())
            case BookingsRead(bookings):
                for booking in bookings:
                    self.bookings.merge(booking, now)
                return self._learn(bookings)
            case MessagesLost():
                self.links.forget_all()
                return self.peers.ask_all()
            case InstanceSuspected(instance_id):
                self.members.suspect(instance_id)
            case InstanceEnded(life):
                return self.members.end(life)
            case LinkHeard(word):
                self.members.hear_of_link(word, now)
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
                return self.peers.notice_silence(now) + self.members.notice_silence(now)
            case RebalanceDue():
                return self._rebalance(now)
            case BusRestored():
                self.members.excuse(now)
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
        prefill, decode = both[0].record, both[1].record
        self.links.note_placed(prefill.instance_id, decode.instance_id, now)
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
        nowhere yet. One that is not booked stays so: its end has been heard.

        Raises as ``place``.
        """
        view = self.instances.get(former.instance_id)
        if view is None or view.record.incarnation != former.incarnation:
            raise NoInstanceReady(f"{former.instance_id} is not known yet, or is gone")
        with self.bookings.uncounted(request.request_id):
            decode = self.placer.choose_decode(request, now, view, wanted, refused).record
        self.links.note_placed(former.instance_id, decode.instance_id, now)
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

    # members

    def _read_members(self, records: tuple[MemberRecord, ...], now: float) -> list[SchedulerCommand]:
        commands = self.members.read(records, now)
        for command in commands:
            if isinstance(command, AnnounceGatewayGone):
                self.waiting.leave_gateway(command.gateway_id)
        return commands

    # balance

    def _rebalance(self, now: float) -> list[SchedulerCommand]:
        """Who is at fault for a link that carries no KV neither gives nor takes."""
        most, at_fault = self.settings.max_requests_per_decode, self.links.at_fault(now)
        workers = [
            view.as_decode_worker(most)
            for view in self.instances.values()
            if has_phase(view.role, "decode") and view.report is not None and view.instance_id not in at_fault
        ]
        return [AskToLeave(departure) for departure in choose_departures(workers)]

    def is_placed(self, request_id: RequestId, attempt: int) -> bool:
        """Whether the booking of that attempt from here stands: nobody ended or replaced it."""
        placed = self.requests.get(request_id)
        return placed is not None and placed.attempt == attempt and placed.deliverer == self.incarnation

    # placing

    def _choose_both(
        self, request: GenerationRequest, excluded: frozenset[InstanceId], now: float, *, is_patient: bool
    ) -> tuple[InstanceView, InstanceView]:
        """Of this scheduler's own group, if there are groups and it has somebody for the request."""
        if self.settings.grouped and self.peers.known:
            instances = ((view.role, view.instance_id) for view in self.instances.values())
            others = self.groups.others(instances, self.peers.known)
            others |= excluded | self.links.at_fault(now)
            with suppress(Overloaded, NoInstanceReady, ContextLengthExceeded):
                return self.placer.choose_both(request, others, now, is_patient=is_patient)
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
        if over.output_tokens is None:
            self.placer.log.end_early(over.request_id, over.attempt)
        else:
            self.placer.lengths.add(over.prompt_tokens, over.output_tokens, is_cut=over.is_cut)
            ended = self.placer.log.end(over.request_id, over.output_tokens, over.ttft_s, over.tpot_s)
            if ended is not None:
                self.placer.regret.compare(ended)
