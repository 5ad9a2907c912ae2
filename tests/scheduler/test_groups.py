"""With groups, a scheduler places on its own part of the instances, elsewhere only what that cannot take."""

import msgspec

from common.config import SchedulerConfig
from common.ids import Incarnation, InstanceId
from common.messages.bookings import BookingsChanged
from scheduler import events
from scheduler.policy.grouping import others_instances
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, handle, ready, report_of

OWN, PEER = Incarnation("1"), Incarnation("2")


def grouped_state() -> SchedulerState:
    """Its own are d0 and p0: sorted by role and name, every second one is dealt to each."""
    state = SchedulerState(LEASE_S, SchedulerConfig(grouped=True), incarnation=OWN)
    ready(state, p0=900, p1=0, d0=0, d1=0)
    return state


def place(state: SchedulerState, name: str) -> tuple[InstanceId, InstanceId]:
    placement = state.place(make_request(name, 10), 0.0)
    state.check()
    return placement.prefill_instance, placement.decode_instance


def test_beside_another_scheduler_only_its_own_part_is_looked_at() -> None:
    state = grouped_state()
    assert place(state, "r0")[0] == "p1", "alone it has all of them"
    handle(state, events.PeerHeard(BookingsChanged("scheduler-1", PEER, 0)))
    assert [place(state, name) for name in ("r1", "r2")] == [("p0", "d0")] * 2
    [decision] = state.placer.log.find("r2")
    assert [len(choice.candidates) for choice in decision.choices] == [1, 1]


def test_what_its_own_part_cannot_take_goes_to_the_others() -> None:
    state = grouped_state()
    handle(state, events.PeerHeard(BookingsChanged("scheduler-1", PEER, 0)))
    handle(state, events.InstanceSuspected(InstanceId("d0")))
    assert place(state, "r0") == ("p1", "d1")
    draining = msgspec.structs.replace(report_of("p0", "prefill", 2), is_draining=True)
    handle(state, events.LoadReported(report_of("d0", "decode", 2)))
    handle(state, events.LoadReported(draining))
    assert place(state, "r1")[0] == "p1"


def test_when_the_other_scheduler_has_gone_all_are_its_own_again() -> None:
    state = grouped_state()
    handle(state, events.PeerHeard(BookingsChanged("scheduler-1", PEER, 0)))
    handle(state, events.PeerHeard(BookingsChanged("scheduler-1", PEER, 0, is_leaving=True)))
    assert place(state, "r0")[0] == "p1"


def test_parts_follow_members_and_their_roles() -> None:
    """They are dealt once for many decisions: every change of members deals them anew."""
    state = grouped_state()
    handle(state, events.PeerHeard(BookingsChanged("scheduler-1", PEER, 0)))
    assert part_of(state) == {"d0", "p0"}
    ready(state, p2=0)
    assert part_of(state) == {"d0", "p0", "p2"}
    flipped = msgspec.structs.replace(report_of("d0", "decode", 2), role="prefill")
    handle(state, events.LoadReported(flipped))
    assert part_of(state) == {"d1", "p0", "p2"}
    handle(state, events.PeerHeard(BookingsChanged("scheduler-2", Incarnation("3"), 0)))
    assert part_of(state) == {"d1", "p1"}
    for peer in state.peers.known.values():
        peer.heard_s = LEASE_S
    for name, view in state.instances.items():
        view.last_heard_s = 0.0 if name == "p0" else LEASE_S
    handle(state, events.TimePassed(), LEASE_S + 0.1)
    assert part_of(state) == {"d1", "p2"}


def part_of(state: SchedulerState) -> set[InstanceId]:
    """After a decision."""
    place(state, "r0")
    members = ((view.role, view.record.instance_id) for view in state.instances.values())
    kept = state.groups.others(iter(()), state.peers.known)
    dealt = others_instances(members, (*state.peers.known, OWN), OWN)
    assert kept == dealt
    return state.instances.keys() - kept
