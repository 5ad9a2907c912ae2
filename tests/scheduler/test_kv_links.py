"""Links that carry no KV: who is taken for the cause, who is placed where meanwhile, when they are tried."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import InstanceId
from common.messages import InstanceLife, KVLinkFailed, KVLinkWorks
from scheduler import events
from scheduler.kv_links import FIRST_BACKOFF_S, FORGET_AFTER_S, LONGEST_BACKOFF_S, KVLinks
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import handle, make_state, ready, record_of

P0, P1, P2, D0, D1, D2 = map(InstanceId, ("p0", "p1", "p2", "d0", "d1", "d2"))
SENDERS, RECEIVERS = (P0, P1, P2), (D0, D1, D2)


def fail(state: SchedulerState, sender: InstanceId, receiver: InstanceId, now: float = 0.0) -> None:
    handle(state, events.LinkHeard(KVLinkFailed(sender, receiver)), now)


def work(state: SchedulerState, sender: InstanceId, receiver: InstanceId, now: float = 0.0) -> None:
    handle(state, events.LinkHeard(KVLinkWorks(sender, receiver)), now)


def placed(state: SchedulerState, name: str, now: float = 0.0) -> tuple[str, str]:
    placement = state.place(make_request(name), now)
    state.check()
    return placement.prefill_instance, placement.decode_instance


def made(**pending: int) -> SchedulerState:
    state = make_state()
    ready(state, **pending)
    return state


def test_after_one_failure_neither_end_is_used_as_long_as_there_are_others() -> None:
    """The cut one has the shorter queue."""
    state = made(p0=0, p1=90, d0=0, d1=0)
    fail(state, P0, D0)
    assert {placed(state, f"r{number}") for number in range(4)} == {("p1", "d1")}


@pytest.mark.parametrize(
    ("members", "there"),
    [
        ({"p0": 0, "d0": 0}, ("p0", "d0")),
        ({"p0": 0, "p1": 90, "d0": 0}, ("p1", "d0")),
        ({"p0": 0, "d0": 0, "d1": 0}, ("p0", "d1")),
    ],
)
def test_where_there_is_nobody_else_an_end_is_used_nevertheless(
    members: dict[str, int], there: tuple[str, str]
) -> None:
    state = made(**members)
    fail(state, P0, D0)
    assert placed(state, "r1") == there


def test_a_mixed_instance_computes_for_itself_what_it_cannot_send() -> None:
    state = made(m0=0, d0=0, d1=0)
    for receiver in (D0, D1):
        fail(state, InstanceId("m0"), receiver)
    assert placed(state, "r1") == ("m0", "m0")


def test_who_failed_with_more_is_the_cause_and_the_others_are_used() -> None:
    state = made(p0=0, p1=90, d0=0, d1=0)
    fail(state, P0, D0)
    fail(state, P0, D1)
    assert state.links.at_fault(0.0) == {P0}
    assert {placed(state, f"r{number}") for number in range(4)} == {("p1", "d0"), ("p1", "d1")}


def test_who_works_with_others_is_not_the_cause() -> None:
    state = made(p0=0, p1=90, d0=0, d1=0)
    fail(state, P0, D0)
    work(state, P1, D0)
    assert state.links.at_fault(0.0) == {P0}
    work(state, P0, D1)
    assert not state.links.at_fault(0.0)


def test_between_two_that_both_work_with_others_nothing_is_sent() -> None:
    links = KVLinks()
    links.fail(P0, D0, 0.0)
    links.work(P0, D1, 0.0)
    links.work(P1, D0, 0.0)
    links.fail(P0, D0, FIRST_BACKOFF_S)
    links.work(P0, D1, FIRST_BACKOFF_S)
    links.work(P1, D0, FIRST_BACKOFF_S)
    assert not links.at_fault(FIRST_BACKOFF_S)
    links.broken[P0, D0].until_s = 99.0
    distrust = links.distrust(50.0)
    assert distrust is not None
    assert distrust.receivers(P0, [D0, D1]) == [D1]
    assert distrust.receivers(P1, [D0, D1]) == [D0, D1]
    assert distrust.senders([P0, P1], [D0], is_anybody_else=False) == [P1]
    assert distrust.senders([P0, P1], [D0, D1], is_anybody_else=False) == [P0, P1]


def test_a_sequence_that_is_to_move_goes_where_its_kv_gets_to() -> None:
    state = made(p0=0, d0=0, d1=0, d2=0)
    fail(state, P0, D0)
    work(state, P0, D2)
    former = InstanceLife(P0, record_of("p0", "prefill").incarnation)
    request = make_request("r1", output_ids=(5,))
    assert state.place_moved(request, former, 0.0, wanted=D0).decode_instance != D0
    assert state.place_moved(request, former, 0.0, wanted=D2).decode_instance == D2


def test_after_a_while_one_request_tries_it_and_the_others_wait_for_what_comes_of_it() -> None:
    state = made(p0=0, p1=90, d0=0)
    fail(state, P0, D0)
    work(state, P1, D0)
    now = FIRST_BACKOFF_S
    assert [placed(state, f"r{number}", now)[0] for number in range(3)] == ["p0", "p1", "p1"]
    fail(state, P0, D0, now + 1.0)
    again_s = now + 1.0 + 2 * FIRST_BACKOFF_S
    assert placed(state, "s1", again_s - 0.1)[0] == "p1"
    assert placed(state, "s2", again_s)[0] == "p0"
    work(state, P0, D0, again_s + 1.0)
    assert {placed(state, f"t{number}", again_s + 1.0)[0] for number in range(3)} == {"p0"}
    assert not state.links.broken


def test_what_failed_together_counts_once_and_the_wait_has_a_bound() -> None:
    links, now = KVLinks(), 0.0
    for _ in range(9):
        for _ in range(20):
            links.fail(P0, D0, now)
        link = links.broken[P0, D0]
        assert now < link.until_s <= now + LONGEST_BACKOFF_S
        now = link.until_s
        links.note_placed(P0, D0, now)
        links.check()
    assert link.backoff_s == LONGEST_BACKOFF_S


def test_of_an_instance_that_is_gone_and_of_long_ago_nothing_is_kept() -> None:
    state = made(p0=0, p1=0, d0=0)
    fail(state, P0, D0)
    handle(state, events.MembersRead((record_of("p0", "prefill", incarnation="i2"),)))
    assert not state.links.broken
    fail(state, InstanceId("p9"), D0)
    assert not state.links.broken
    links = KVLinks()
    links.fail(P0, D0, 0.0)
    links.forget_old(FORGET_AFTER_S)
    assert links.broken
    links.forget_old(FORGET_AFTER_S + 1)
    assert not links.broken


def test_decisions_say_why_it_was_no_candidate() -> None:
    state = made(p0=0, p1=90, d0=0, d1=0)
    fail(state, P0, D0)
    placed(state, "r1")
    [prefill, decode] = state.placer.log.newest(1)[0].choices
    why = "KV did not get from p0 to d0, and has not since"
    assert [(each.instance_id, each.reason) for each in prefill.barred] == [(P0, why)]
    assert [(each.instance_id, each.reason) for each in decode.barred] == [(D0, why)]


def test_who_lost_messages_may_have_missed_that_it_works() -> None:
    state = made(p0=0, p1=90, d0=0)
    fail(state, P0, D0)
    handle(state, events.MessagesLost())
    assert placed(state, "r1")[0] == "p0"


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, InstanceId, InstanceId, float]]:
    told = st.tuples(
        st.sampled_from(["fail", "work", "place"]),
        st.sampled_from(SENDERS),
        st.sampled_from(RECEIVERS),
        st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    )
    return draw(st.lists(told, max_size=40))


@given(histories(), st.data())
def test_whatever_is_told_somebody_is_taken_and_each_link_is_tried_again(
    history: list[tuple[str, InstanceId, InstanceId, float]], data: st.DataObject
) -> None:
    links, now = KVLinks(), 0.0
    for what, sender, receiver, later_s in history:
        now += later_s
        if what == "fail":
            links.fail(sender, receiver, now)
        elif what == "work":
            links.work(sender, receiver, now)
            assert (sender, receiver) not in links.broken
            assert links.at_fault(now).isdisjoint((sender, receiver))
        else:
            links.note_placed(sender, receiver, now)
        links.check()
    able = data.draw(st.lists(st.sampled_from(SENDERS), min_size=1, unique=True))
    others = data.draw(st.lists(st.sampled_from(RECEIVERS), min_size=1, unique=True))
    distrust = links.distrust(now)
    if distrust is not None:
        assert distrust.senders(able, others, is_anybody_else=False)
        for sender in able:
            assert distrust.receivers(sender, others)
    assert links.distrust(now + LONGEST_BACKOFF_S) is None


@given(st.sampled_from(SENDERS), st.permutations(list(product(SENDERS, RECEIVERS))))
def test_the_one_that_is_cut_is_found_once_it_failed_with_two(
    cut: InstanceId, order: list[tuple[InstanceId, InstanceId]]
) -> None:
    """Whatever the others' transfers have said by then."""
    links, failed = KVLinks(), 0
    for sender, receiver in order:
        if sender == cut:
            links.fail(sender, receiver, 1.0)
            failed += 1
        else:
            links.work(sender, receiver, 1.0)
        if failed >= 2:
            assert links.at_fault(1.0) == {cut}
