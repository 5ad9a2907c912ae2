"""What a report counts, of states as they come to be."""

from common.messages import LoadReport
from decode import events
from decode.state import DecodeState
from services.hosts.load_report import make_load_report
from services.hosts.measured_speed import MeasuredSpeed
from tests.decode.states import handle, make_state, start, task_of
from tests.prefill.states import make_state as make_prefill_state


def report_of(decode: DecodeState) -> LoadReport:
    return make_load_report(
        make_prefill_state(),
        decode,
        MeasuredSpeed(),
        sequence=1,
        role="decode",
        home="decode",
        can_hand_on=True,
        tpot_s=lambda service_class: 0.1,
        now=0.0,
    )


def test_who_waits_for_memory_or_a_place_is_told_from_who_is_on_its_way() -> None:
    decode = make_state(total_blocks=64, max_batch=2)
    start(decode, "r1")
    handle(decode, events.TaskArrived(task_of("r2")))
    report = report_of(decode)
    assert (report.decode_running, report.decode_waiting, report.decode_unadmitted) == (1, 1, 0)
    handle(decode, events.TaskArrived(task_of("r3")))
    report = report_of(decode)
    assert (report.decode_waiting, report.decode_unadmitted) == (2, 1), "the batch has no place for it"
    full = make_state(total_blocks=3, max_batch=8)
    start(full, "r1")
    handle(full, events.TaskArrived(task_of("r2")))
    report = report_of(full)
    assert (report.decode_waiting, report.decode_unadmitted) == (1, 1), "the pool has no block for it"
