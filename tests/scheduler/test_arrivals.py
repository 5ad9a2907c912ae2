"""Which requests are new to the mesh."""

from common.ids import RequestId
from scheduler.arrivals import Arrivals
from scheduler.bookings import REMEMBERED_S

R1 = RequestId("r1")


def test_a_request_is_new_once_until_nothing_has_been_heard_of_it_for_long() -> None:
    arrivals = Arrivals()
    assert arrivals.is_new(R1, 0.0, is_here=False)
    assert not arrivals.is_new(R1, REMEMBERED_S, is_here=False)
    assert not arrivals.is_new(R1, 2 * REMEMBERED_S, is_here=False)
    assert arrivals.is_new(RequestId("r2"), 3.1 * REMEMBERED_S, is_here=False)
    assert arrivals.is_new(R1, 3.1 * REMEMBERED_S, is_here=False)


def test_the_next_attempt_of_one_that_ran_for_long_is_not_new_and_neither_is_one_that_is_here() -> None:
    arrivals = Arrivals()
    assert not arrivals.is_new(R1, 0.0, is_here=True)
    arrivals.note_ended(R1, 10 * REMEMBERED_S, is_here=True)
    assert not arrivals.is_new(R1, 10 * REMEMBERED_S + 1.0, is_here=False)


def test_an_end_is_no_first_word() -> None:
    arrivals = Arrivals()
    arrivals.note_ended(R1, 0.0, is_here=False)
    assert arrivals.is_new(R1, 1.0, is_here=False)
