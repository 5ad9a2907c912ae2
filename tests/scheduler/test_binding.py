"""Where a sequence is decoded whose prompt has been computed: by what is known then."""

import msgspec

from common.config import SchedulerConfig
from common.ids import Incarnation, InstanceId
from common.lengths import certain
from common.messages import InstanceLife
from scheduler import events
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, handle, ready, report_of

P0 = InstanceLife(InstanceId("p0"), Incarnation("i1"))
COMPUTED = make_request("r0", 20, output_ids=(7,))


def placed(settings: SchedulerConfig | None = None) -> SchedulerState:
    """r0, for d0."""
    state = SchedulerState(LEASE_S, settings or SchedulerConfig())
    ready(state, p0=0, d0=0, d1=0)
    assert state.place(make_request("r0", 20), 0.0).decode_instance == "d0"
    return state


def bind(state: SchedulerState) -> str:
    chosen = state.place_moved(COMPUTED, P0, 1.0).decode_instance
    state.check()
    return chosen


def test_its_own_booking_makes_nobody_look_loaded() -> None:
    assert bind(placed()) == "d0"
    assert bind(placed(SchedulerConfig(max_requests_per_decode=1))) == "d0", "it has a place there"


def test_what_has_come_meanwhile_counts_and_the_booking_goes_along() -> None:
    state = placed()
    told = msgspec.structs.replace(report_of("d0", "decode", 2), decode_running=1, decode_tokens=100)
    handle(state, events.LoadReported(told))
    assert bind(state) == "d1"
    booked = {name: view.booked.decoding for name, view in state.instances.items()}
    assert booked == {"p0": 0, "d0": 0, "d1": 1}


def test_what_a_predictor_has_said_meanwhile_is_told_where_it_is_decoded() -> None:
    state = placed()
    assert state.tell_length(COMPUTED) == []
    handle(state, events.LengthPredicted(make_request("r0", 20), certain(3)))
    told = msgspec.structs.replace(report_of("d0", "decode", 2), decode_tokens=100)
    handle(state, events.LoadReported(told))
    assert bind(state) == "d1"
    [command] = state.tell_length(COMPUTED)
    assert isinstance(command, events.TellLength)
    assert command.decode_instance == "d1"


def test_where_its_prompt_was_computed_stays_explained() -> None:
    state = placed()
    bind(state)
    [decision] = state.placer.log.find("r0")
    assert [choice.phase for choice in decision.choices] == ["prefill", "decode"]
