"""A predictor's word on a request that was placed: what is expected of it from then on, and who is told."""

import pytest

from common.ids import RequestId
from common.lengths import LengthDistribution, certain
from common.predictions import KEPT, NewestLengths
from scheduler import events
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, gateway_record, handle, make_state, ready, record_of

R1 = RequestId("r1")


def placed_state() -> SchedulerState:
    state = make_state()
    ready(state, p0=0, d0=0)
    state.place(make_request("r1", 10, max_tokens=900), 0.0)
    return state


def test_the_booking_follows_the_prediction_and_the_decode_instance_is_told() -> None:
    state = placed_state()
    assert state.requests[R1].expected_tokens == 256
    request = make_request("r1", 10, max_tokens=900)
    [told] = handle(state, events.LengthPredicted(request, certain(40)))
    assert told == events.TellLength(state.requests[R1].placement.decode_instance, R1, 0, certain(40))
    assert state.requests[R1].expected_tokens == 40
    assert not state.requests[R1].is_heavy


def test_a_prediction_is_cut_by_what_the_request_may_draw() -> None:
    state = placed_state()
    handle(state, events.LengthPredicted(make_request("r1", 10, max_tokens=900), certain(5000)))
    assert state.requests[R1].expected_tokens == 900


def test_a_later_attempt_is_placed_by_what_was_predicted_of_the_first() -> None:
    state = placed_state()
    lengths = LengthDistribution(((40.0, 0.5), (400.0, 0.5)))
    handle(state, events.LengthPredicted(make_request("r1", 10, max_tokens=900), lengths))
    again = make_request("r1", 10, max_tokens=900, attempt=1, output_ids=(5,) * 100)
    state.place(again, 0.0)
    assert state.placer.predict(again) == certain(400)
    assert state.requests[R1].expected_tokens == pytest.approx(300)


def test_a_prediction_of_an_attempt_that_is_over_changes_nothing() -> None:
    state = placed_state()
    late = events.LengthPredicted(make_request("r1", 10, max_tokens=900), certain(40))
    state.place(make_request("r1", 10, max_tokens=900, attempt=1), 0.0)
    assert handle(state, late) == []
    handle(state, events.RequestOver(R1, attempt=1))
    assert handle(state, late) == []
    assert len(state.placer.predicted) == 0


def test_a_prediction_reaches_a_placement_that_has_lost_an_instance_only_with_its_next_attempt() -> None:
    state = placed_state()
    handle(state, events.MembersRead((gateway_record(), record_of("d0", "decode"))), now=LEASE_S + 1)
    handle(state, events.TimePassed(), now=LEASE_S + 1)
    request = make_request("r1", 10, max_tokens=900)
    assert handle(state, events.LengthPredicted(request, certain(40))) == []
    assert state.placer.predict(request) == certain(40)


def test_what_was_predicted_is_forgotten_with_the_request() -> None:
    state = placed_state()
    handle(state, events.LengthPredicted(make_request("r1", 10, max_tokens=900), certain(40)))
    handle(state, events.RequestOver(R1, 10, 38))
    assert len(state.placer.predicted) == 0


def test_only_the_newest_predictions_are_kept() -> None:
    kept = NewestLengths[int]()
    for number in range(KEPT + 10):
        kept.keep(number, certain(number + 1))
    assert len(kept) == KEPT
    assert kept.find(9) is None
    assert kept.find(10) == certain(11)
    kept.keep(10, certain(5))
    assert kept.forget(10) == certain(5)
    assert kept.find(10) is None
