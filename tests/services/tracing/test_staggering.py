"""What a recorded mesh's batches could reach, from what a real attention worker records."""

from statistics import median

from common.timeline import records_of, timeline
from common.timeline_events import ATTENTION, ATTENTION_STEP
from services.tracing.collect import Clock, MeshTrace, ServiceTrace
from services.tracing.layout import lay_out
from services.tracing.staggering import layer_attention_s
from tests.attention.lanes import attention_workers
from tests.attention.test_engine import STEPS, logits_of
from tests.common.model.conftest import MakeTiny


def test_a_layers_attention_is_what_a_worker_computes_before_k_and_v_come_and_after(tiny: MakeTiny) -> None:
    program = tiny("llama").program
    with attention_workers(program, 1, mini_batches=2) as workers:
        timeline.start(60 * 10**9)
        try:
            logits_of(program, workers.remote[0])
            workers.wait_steps(len(STEPS))
        finally:
            recording = timeline.take()
    assert recording is not None
    records = [record for thread in recording.threads for record in records_of(thread)]
    steps = [record for record in records if record.event == ATTENTION_STEP]
    assert len(steps) == len(STEPS)
    layers = program.spec.layers
    computed_ns = [
        sum(
            each.end_ns - each.begin_ns
            for each in records
            if each.event == ATTENTION and step.begin_ns <= each.begin_ns and each.end_ns <= step.end_ns
        )
        for step in steps
    ]
    worker = ServiceTrace("attention-0", "attention", "host", 7, Clock(0, 10), recording)
    found_s = layer_attention_s(lay_out(MeshTrace(recording.began_ns, recording.ended_ns, (worker,), ())))
    assert found_s is not None
    assert median(computed_ns) / layers <= found_s * 1e9
    assert found_s * 1e9 <= median(step.end_ns - step.begin_ns for step in steps) / layers
