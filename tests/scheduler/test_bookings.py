"""Several schedulers: what one has booked the others count, whatever is lost or comes in another order."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import SchedulerConfig
from common.errors import RequestCancelled, RequestError
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.lengths import certain
from common.messages import GenerationRequest, InstanceLife, Role
from common.messages.bookings import BookingsChanged
from scheduler import events
from scheduler.bookings import REMEMBERED_S
from scheduler.membership import STALE_AFTER_S
from scheduler.state import SchedulerState
from tests.requests import GATEWAY, make_request
from tests.scheduler.states import LEASE_S, handle, ready, report_of

R1 = RequestId("r1")
INSTANCES: dict[str, Role] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
LIFE = Incarnation("i1")


def scheduler(name: str) -> SchedulerState:
    limits = SchedulerConfig(max_pending_prefill_tokens=1000, max_requests_per_decode=100)
    state = SchedulerState(LEASE_S, limits, incarnation=Incarnation(name))
    ready(state, p0=0, p1=0, d0=0, d1=0)
    return state


def word_of(state: SchedulerState) -> BookingsChanged:
    """What it would publish now."""
    bookings = state.bookings.take_changes()
    return BookingsChanged(state.incarnation, state.incarnation, state.bookings.changed, bookings)


def tell(sender: SchedulerState, *hearers: SchedulerState) -> None:
    message = word_of(sender)
    for hearer in hearers:
        for command in handle(hearer, events.PeerHeard(message)):
            assert command == events.ReadPeer(sender.incarnation, sender.incarnation)
            handle(hearer, events.PeerRead(sender.incarnation, sender.bookings.read(None, 1000)[0]))


def acquainted(*names: str) -> list[SchedulerState]:
    states = [scheduler(name) for name in names]
    for sender in states:
        tell(sender, *(each for each in states if each is not sender))
    return states


def test_two_schedulers_do_not_fill_the_same_instance_between_reports() -> None:
    a, b = acquainted("a", "b")
    first = a.place(make_request("r1", 900), 0.0)
    tell(a, b)
    second = b.place(make_request("r2", 900), 0.0)
    assert {first.prefill_instance, second.prefill_instance} == {"p0", "p1"}
    tell(b, a)
    for state in (a, b):
        for placement in (first, second):
            view = state.instances[placement.prefill_instance]
            assert view.for_prefill.pending_tokens == 900


def test_what_is_said_of_a_request_by_its_deliverer_is_known_to_all() -> None:
    a, b = acquainted("a", "b")
    a.place(make_request("r1", 10, max_tokens=900), 0.0)
    tell(a, b)
    assert b.requests[R1].expected_tokens == 256
    assert b.requests[R1].acknowledged_s is None
    handle(a, events.LengthPredicted(make_request("r1", 10, max_tokens=900), certain(40)))
    handle(a, events.TaskAcknowledged(R1, 0))
    tell(a, b)
    assert b.requests[R1].expected_tokens == 40
    assert b.requests[R1].acknowledged_s is not None
    handle(a, events.TaskUndelivered(R1, 0))
    tell(a, b)
    assert R1 not in b.requests
    # A later attempt is placed by the prediction, wherever it is submitted.
    again = make_request("r1", 10, max_tokens=900, attempt=1)
    b.place(again, 0.0)
    assert b.placer.predict(again) == certain(40)


def test_an_end_that_overtakes_the_booking_leaves_nothing() -> None:
    a, b = acquainted("a", "b")
    a.place(make_request("r1", 10), 0.0)
    late = word_of(a)
    handle(b, events.RequestOver(R1))
    handle(b, events.PeerHeard(late))
    assert R1 not in b.requests
    with pytest.raises(RequestCancelled):
        b.place(make_request("r1", 10), 0.0)
    # The end of an attempt that came to nothing says nothing of the next one.
    b.place(make_request("r1", 10, attempt=1), 0.0)
    handle(b, events.RequestOver(R1))
    assert R1 in b.requests


def test_the_same_attempt_at_two_schedulers_is_one_booking_and_neither_ends_the_others() -> None:
    a, b = acquainted("a", "b")
    a.place(make_request("r1", 10), 0.0)
    b.place(make_request("r1", 10), 0.0, frozenset({InstanceId("p0")}))
    told_a, told_b = word_of(a), word_of(b)
    handle(a, events.PeerHeard(told_b))
    handle(b, events.PeerHeard(told_a))
    assert a.requests[R1].version == b.requests[R1].version
    winner, loser = (a, b) if a.requests[R1].deliverer == "a" else (b, a)
    handle(loser, events.TaskUndelivered(R1, 0))
    assert not loser.is_placed(R1, 0)
    assert winner.is_placed(R1, 0)
    assert R1 in loser.requests


def test_a_running_sequence_may_be_moved_by_any_scheduler() -> None:
    a, b = acquainted("a", "b")
    placement = a.place(make_request("r1", 10), 0.0)
    tell(a, b)
    former = InstanceLife(placement.decode_instance, LIFE)
    moved = b.place_moved(make_request("r1", 10, output_ids=(1, 2)), former, 1.0)
    tell(b, a)
    assert a.requests[R1].placement == moved
    # Its deliverer is told only now that it was delivered.
    handle(a, events.TaskAcknowledged(R1, 0), 1.0)
    tell(a, b)
    assert b.requests[R1].placement == moved


def test_a_prediction_that_comes_after_a_move_to_an_instance_unknown_here_is_kept_for_later() -> None:
    a, b = acquainted("a", "b")
    placement = a.place(make_request("r1", 10, max_tokens=900), 0.0)
    tell(a, b)
    ready(b, d2=0)
    former = InstanceLife(placement.decode_instance, LIFE)
    running = make_request("r1", 10, max_tokens=900, output_ids=(1, 2))
    b.place_moved(running, former, 1.0, InstanceId("d2"))
    tell(b, a)
    told = handle(a, events.LengthPredicted(make_request("r1", 10, max_tokens=900), certain(40)))
    assert told == [events.TellLength(InstanceId("d2"), R1, 0, certain(40))]
    ready(a, d2=0)
    assert a.instances[InstanceId("d2")].booked.decoding_expected == 40
    tell(a, b)
    assert b.requests[R1].expected_tokens == 40


def test_who_begins_learns_everything_also_what_a_dead_scheduler_had_booked() -> None:
    a, b = acquainted("a", "b")
    a.place(make_request("r1", 300), 0.0)
    handle(a, events.TaskAcknowledged(R1, 0))
    tell(a, b)
    c = SchedulerState(LEASE_S, incarnation=Incarnation("c"))
    # Before it knows of any instance.
    tell(b, c)
    ready(c, p0=0, p1=0, d0=0, d1=0)
    assert c.requests[R1].placement == a.requests[R1].placement
    assert c.instances[a.requests[R1].placement.decode_instance].placed == {"r1"}


def test_a_scheduler_that_dies_amid_a_delivery_is_announced_and_its_booking_goes_when_nobody_works() -> None:
    a, b = acquainted("a", "b")
    a.place(make_request("r1", 300), 0.0)
    tell(a, b)
    for name in ("p0", "p1", "d0", "d1"):
        b.instances[InstanceId(name)].last_heard_s = LEASE_S
    gone = handle(b, events.TimePassed(), LEASE_S + 0.1)
    assert gone == [events.AnnounceSchedulerGone("a", Incarnation("a"))]
    assert b.requests[R1].acknowledged_s == LEASE_S + 0.1
    # The gateway submits it again.
    b.place(make_request("r1", 300, attempt=1), LEASE_S + 0.2)
    handle(b, events.RequestOver(R1, attempt=1))
    assert not b.requests


def test_a_delivery_of_which_nobody_will_tell_holds_no_booking_after_its_instance_either() -> None:
    """The instance goes first, then the scheduler that delivers, and the word of the end is lost."""
    a, b = acquainted("a", "b")
    lost = a.place(make_request("r1", 300), 0.0).prefill_instance
    tell(a, b)
    b.peers.known[a.incarnation].heard_s = 1.0
    for view in b.instances.values():
        view.last_heard_s = 0.0 if view.record.instance_id == lost else 3 * LEASE_S
    handle(b, events.TimePassed(), LEASE_S + 0.1)
    assert b.requests[R1].is_void
    handle(b, events.TimePassed(), 2 * LEASE_S)
    assert b.requests[R1].is_void, "word of its delivery may be under way"
    handle(b, events.TimePassed(), 2.1 * LEASE_S + STALE_AFTER_S)
    assert not b.requests


def test_a_scheduler_that_was_never_heard_is_announced_once_its_delivery_is_a_lease_old() -> None:
    """b booked r1 and told a alone, which told c; of what b said nothing reached c."""
    a, b = acquainted("a", "b")
    b.place(make_request("r1", 300), 0.0)
    tell(b, a)
    c = scheduler("c")
    tell(a, c)
    assert c.requests[R1].deliverer == b.incarnation
    assert b.incarnation not in c.peers.known
    for now, gone in ((1.0, []), (1.1 + LEASE_S, [events.AnnounceSchedulerGone("b", b.incarnation)])):
        c.peers.known[a.incarnation].heard_s = now
        for view in c.instances.values():
            view.last_heard_s = now
        assert handle(c, events.TimePassed(), now)[: len(gone) or None] == gone
    assert c.requests[R1].acknowledged_s == 1.1 + LEASE_S


def test_the_end_of_a_request_is_remembered_for_a_minute_however_many_end_meanwhile() -> None:
    """Its booking, which came from a scheduler that hung, would stand until its instances are idle."""
    a, b = acquainted("a", "b")
    a.place(make_request("r1", 300), 0.0)
    late = word_of(a)
    handle(b, events.RequestOver(R1))
    for number in range(10_000):
        b.handle(events.RequestOver(RequestId(f"other-{number}")), 1.0)
    handle(b, events.PeerHeard(late), REMEMBERED_S)
    assert R1 not in b.requests
    handle(b, events.TimePassed(), 2 * REMEMBERED_S + 1.1)
    assert not b.bookings.unbooked


def test_a_dead_gateway_s_booking_goes_where_neither_it_nor_the_instances_were_ever_seen() -> None:
    """Told by a scheduler that then ends, too; nobody else ever speaks of that request again."""
    [a] = acquainted("a")
    a.place(make_request("r1", 10), 0.0)
    late = SchedulerState(LEASE_S, SchedulerConfig(), incarnation=Incarnation("late"))
    tell(a, late)
    assert R1 in late.requests
    handle(late, events.MembersRead(()), now=1.0)
    assert R1 in late.requests
    commands = handle(late, events.MembersRead(()), now=1.1 + LEASE_S)
    assert commands == [events.AnnounceGatewayGone(GatewayId(GATEWAY))]
    assert R1 not in late.requests


def test_one_that_leaves_is_not_announced_as_dead() -> None:
    a, b = acquainted("a", "b")
    handle(b, events.PeerHeard(BookingsChanged("a", a.incarnation, 0, is_leaving=True)))
    assert not b.peers.known
    handle(b, events.BusRestored(), 10.0)
    assert handle(b, events.TimePassed(), 10.0) == []


# a lossy channel


@dataclass(slots=True)
class Channel:
    """Between each two its messages keep their order or are lost; between different pairs nothing is kept."""

    chance: random.Random
    states: dict[str, SchedulerState]
    loss: float
    now: float = 0.0
    under_way: dict[tuple[str, str], list[events.SchedulerStateEvent]] = field(default_factory=dict)

    def publish(self, name: str) -> None:
        message = word_of(self.states[name])
        for hearer in sorted(self.states.keys() - {name}):
            self.send(name, hearer, events.PeerHeard(message))

    def end(self, request: GenerationRequest) -> None:
        """The gateway's word. To one it may be lost, which NATS says then, though not what it was."""
        is_lost = self.chance.random() < self.loss
        deaf = self.chance.choice(sorted(self.states)) if is_lost else None
        for hearer in self.states:
            over = events.RequestOver(request.request_id, attempt=request.attempt)
            event = events.MessagesLost() if hearer == deaf else over
            self.under_way.setdefault(("gateway", hearer), []).append(event)

    def send(self, sender: str, hearer: str, event: events.SchedulerStateEvent) -> None:
        if self.chance.random() >= self.loss:
            self.under_way.setdefault((sender, hearer), []).append(event)

    def deliver_one(self, only: str | None = None) -> bool:
        """To anybody, or only to that one; whether there was something."""
        ways = sorted(way for way, waiting in self.under_way.items() if waiting and only in (None, way[1]))
        if not ways:
            return False
        _, hearer = way = self.chance.choice(ways)
        event = self.under_way[way].pop(0)
        if hearer in self.states:
            self.handle(hearer, event)
        return True

    def handle(self, name: str, event: events.SchedulerStateEvent) -> None:
        state = self.states[name]
        for command in handle(state, event, self.now):
            if isinstance(command, events.ReadPeer):
                # The question comes after all that was sent to the peer before: there is one server.
                while self.deliver_one(command.scheduler_id):
                    pass
                peer = self.states.get(command.scheduler_id)
                is_answered = peer is not None and self.chance.random() >= self.loss
                bookings = peer.bookings.read(None, 10_000)[0] if peer and is_answered else None
                self.under_way.setdefault((command.scheduler_id, name), []).append(
                    events.PeerRead(command.incarnation, bookings)
                )

    def settle(self) -> None:
        """Nothing is lost any more, and everybody's heart beats, for longer than two leases: in the first one
        a death is noticed by who had heard the dead, in the second by who knows only its deliveries."""
        self.loss = 0.0
        for _ in range(13):
            self.now += LEASE_S / 5
            for name, state in sorted(self.states.items()):
                for view in state.instances.values():
                    view.last_heard_s = self.now
                self.publish(name)
                self.handle(name, events.TimePassed())
            while self.deliver_one():
                pass


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_bookings_converge_and_nothing_leaks_over_a_channel_that_loses(seed: int) -> None:
    chance = random.Random(seed)
    channel = Channel(chance, {name: scheduler(name) for name in "abc"}, loss=chance.choice([0.0, 0.2]))
    submitted: dict[RequestId, GenerationRequest] = {}
    over: set[RequestId] = set()
    for step in range(chance.choice([30, 120])):
        name = chance.choice(sorted(channel.states))
        state = channel.states[name]
        open_ids = sorted(submitted.keys() - over)
        choice = chance.random()
        request_id = chance.choice(open_ids) if open_ids else None
        if choice < 0.3 or request_id is None:
            # New, or the same attempt once more after a time-out, or the next one.
            request = make_request(f"r{step}", chance.randint(1, 60))
            if request_id is not None and chance.random() < 0.3:
                known = submitted[request_id]
                request = make_request(request_id, known.tokens, attempt=known.attempt + chance.randrange(2))
            submitted[request.request_id] = request
            try:
                state.place(request, channel.now)
            except RequestError:
                assert not state.is_placed(request.request_id, request.attempt)
        elif choice < 0.4:
            channel.handle(name, events.TaskAcknowledged(request_id, submitted[request_id].attempt))
        elif choice < 0.45:
            channel.handle(name, events.TaskUndelivered(request_id, submitted[request_id].attempt))
        elif choice < 0.5:
            channel.handle(name, events.LengthPredicted(submitted[request_id], certain(step)))
        elif choice < 0.55:
            placed = state.requests.get(request_id)
            if placed is not None:
                former = InstanceLife(placed.placement.decode_instance, LIFE)
                state.place_moved(submitted[request_id], former, channel.now)
        elif choice < 0.65:
            over.add(request_id)
            channel.end(submitted[request_id])
        elif choice < 0.67 and "c" in channel.states and name == "c":
            # One dies; what it has sent arrives or does not. Another begins.
            del channel.states[name]
            channel.states[f"{name}2"] = scheduler(f"{name}2")
        elif choice < 0.85:
            channel.publish(name)
        else:
            channel.deliver_one()
        for each in channel.states.values():
            each.check()
    channel.settle()
    for name in sorted(channel.states):
        # Whose prompt an instance's report counts is each scheduler's own to see, and then alike.
        for instance, role in INSTANCES.items():
            channel.handle(name, events.LoadReported(report_of(instance, role, sequence=2)))
    first, *others = channel.states.values()
    for other in others:
        assert versions(other) == versions(first)
        assert {name: view.booked for name, view in other.instances.items()} == {
            name: view.booked for name, view in first.instances.items()
        }
    for request_id in submitted.keys() - over:
        channel.end(submitted[request_id])
    channel.settle()
    for state in channel.states.values():
        assert not state.requests
        assert all(not view.placed for view in state.instances.values())


def versions(state: SchedulerState) -> dict[RequestId, object]:
    return {request_id: (placed.version, placed.placement) for request_id, placed in state.requests.items()}
