"""Instances of several pools of KV: the largest says what fits, all together how full one is."""

import pytest

from common.errors import ContextLengthExceeded, NoInstanceReady
from common.ids import InstanceId
from scheduler import events
from scheduler.state import SchedulerState
from tests.requests import make_request
from tests.scheduler.states import (
    gateway_record,
    handle,
    make_state,
    record_of,
    report_of,
)


def with_pools(largest_at_start: int, largest_now: int) -> SchedulerState:
    """``d0`` has several pools, of 64 blocks of 16 tokens together."""
    state = make_state()
    record = record_of("d0", "decode", largest_pool_blocks=largest_at_start)
    handle(state, events.MembersRead((gateway_record(), record_of("p0", "prefill"), record)))
    handle(state, events.LoadReported(report_of("p0", "prefill")))
    report = report_of("d0", "decode", largest_pool_blocks=largest_now)
    handle(state, events.LoadReported(report))
    return state


def test_what_fits_an_instances_pools_together_but_none_of_them_is_refused_for_good() -> None:
    state = with_pools(largest_at_start=10, largest_now=10)
    with pytest.raises(ContextLengthExceeded, match="holds 160") as refused:
        state.place(make_request("r0", 100, max_tokens=61), 0.0)
    assert refused.value.param == "max_tokens"
    assert state.place(make_request("r1", 100, max_tokens=60), 0.0).decode_instance == "d0"
    assert not state.instances[InstanceId("d0")].placed & {"r0"}


def test_a_pool_that_has_come_is_used_and_one_that_has_gone_is_waited_for() -> None:
    grown = with_pools(largest_at_start=10, largest_now=20)
    assert grown.place(make_request("r0", 100, max_tokens=200), 0.0).decode_instance == "d0"
    shrunk = with_pools(largest_at_start=20, largest_now=10)
    with pytest.raises(NoInstanceReady, match="that holds 300"):
        shrunk.place(make_request("r0", 100, max_tokens=200), 0.0)


def test_instances_are_balanced_by_all_their_pools_together() -> None:
    state = with_pools(largest_at_start=10, largest_now=10)
    records = (
        *(view.record for view in state.instances.values()),
        record_of("d1", "decode", total_blocks=16),
    )
    handle(state, events.MembersRead(records))
    handle(state, events.LoadReported(report_of("d1", "decode", total_blocks=16)))
    chosen = [state.place(make_request(f"r{number}", 20), 0.0).decode_instance for number in range(5)]
    assert chosen == ["d0", "d1", "d0", "d0", "d0"]
