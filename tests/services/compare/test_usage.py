"""How long instances are used, by what they report; worked by hand."""

import os
import threading
import time

import pytest

from common.ids import InstanceId
from common.messages import LoadReport, Role
from common.thread_names import name_thread
from services.compare.usage import InstanceUse, UseRecorder, computing_s, processor_s, resource_time_of
from tests.load_reports import make_report

PREFILL, DECODE, OTHER = InstanceId("prefill-0"), InstanceId("decode-0"), InstanceId("decode-1")


def report(instance_id: InstanceId, **counts: int) -> LoadReport:
    role: Role = "prefill" if instance_id == PREFILL else "decode"
    return make_report(instance_id, role, 8, **counts)


def test_resource_time_is_from_first_to_last_use_of_every_instance() -> None:
    recorder = UseRecorder()
    for instance_id in (PREFILL, DECODE, OTHER):
        recorder.take(report(instance_id), 10.0)
    assert recorder.is_idle
    recorder.take(report(PREFILL, pending_prefill_requests=1), 11.0)
    recorder.take(report(PREFILL, handovers_waiting=1), 11.5)
    recorder.take(report(DECODE, decode_waiting=1), 11.5)
    recorder.take(report(PREFILL), 12.0)
    recorder.take(report(DECODE, decode_running=1), 12.0)
    assert not recorder.is_idle
    recorder.take(report(PREFILL, pending_prefill_requests=1), 13.0)
    recorder.take(report(PREFILL), 13.5)
    recorder.take(report(DECODE), 15.0)
    assert recorder.is_idle
    assert recorder.uses() == [InstanceUse(DECODE, 3.5, 3.5), InstanceUse(PREFILL, 2.5, 1.5)]
    assert resource_time_of(recorder.uses()) == 6.0, "the instance that nobody used costs nothing"


def test_the_processor_s_time_of_a_process_grows_with_what_it_computes_and_a_gone_one_has_none() -> None:
    gone = 2**22 + 1
    before_s = processor_s((os.getpid(), gone))
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
    assert processor_s((os.getpid(), gone)) - before_s == pytest.approx(0.1, abs=0.05)
    assert processor_s((gone,)) == 0


def test_threads_that_run_the_model_are_told_from_the_others() -> None:
    before_s = computing_s((os.getpid(),)), processor_s((os.getpid(),))

    def compute(name: str) -> None:
        name_thread(name)
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass
        seen.append(computing_s((os.getpid(),)) - before_s[0])

    seen: list[float] = []
    for name in ("loop", "engine", "attention"):
        thread = threading.Thread(target=compute, args=(name,))
        thread.start()
        thread.join()
    assert seen == pytest.approx([0.0, 0.1, 0.1], abs=0.05)
    assert processor_s((os.getpid(),)) - before_s[1] >= 0.25
