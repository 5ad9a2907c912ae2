"""What role policies are told of instances."""

from common.ids import InstanceId
from scheduler import events
from scheduler.workers import workers_of
from tests.load_reports import make_report
from tests.requests import make_request
from tests.scheduler.states import handle, make_state, ready


def test_what_is_booked_for_decode_is_told_apart_from_what_is_there() -> None:
    state = make_state()
    ready(state, p0=0, d0=0)
    for number in range(3):
        state.place(make_request(f"r{number}", 10), 0.0)
    handle(state, events.LoadReported(make_report("d0", "decode", sequence=2, decode_running=1)))
    [worker] = [each for each in workers_of(state) if each.instance_id == InstanceId("d0")]
    assert (worker.decodes, worker.coming, worker.is_busy) == (3, 2, True)
    handle(state, events.LoadReported(make_report("d0", "decode", sequence=3)))
    [worker] = [each for each in workers_of(state) if each.instance_id == InstanceId("d0")]
    assert (worker.decodes, worker.coming, worker.is_busy) == (3, 3, False)


def test_who_waits_for_room_is_told_apart_from_whose_kv_is_on_its_way() -> None:
    """A decode instance that takes in KV, with memory to spare, needs nobody's help."""
    state = make_state()
    ready(state, p0=0, d0=0)
    for sequence, (waiting, unadmitted) in enumerate([(3, 0), (3, 2)], 2):
        report = make_report(
            "d0", "decode", sequence=sequence, decode_waiting=waiting, decode_unadmitted=unadmitted
        )
        handle(state, events.LoadReported(report))
        [worker] = [each for each in workers_of(state) if each.instance_id == InstanceId("d0")]
        assert worker.waiting == unadmitted
