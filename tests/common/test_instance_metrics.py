"""What an instance shows of itself."""

from common.instance_metrics import InstanceMetrics
from common.telemetry import new_registry
from tests.load_reports import make_report
from tests.metric_samples import samples


def test_an_instance_shows_its_pool_its_queues_and_its_work() -> None:
    registry = new_registry("prefill")
    metrics = InstanceMetrics(registry)
    metrics.observe_chunk(128, 0.5)
    metrics.observe_prefill(0.01, 0.5)
    metrics.observe_step(4, 0.02)
    metrics.observe_transfer(1 << 20, 0.1)
    metrics.transfer_failed()
    metrics.preempted(2)
    report = make_report(
        "i",
        "prefill",
        10,
        pending_prefill_tokens=77,
        pending_prefill_requests=3,
        handovers_waiting=1,
        decode_running=4,
        decode_waiting=2,
        decode_tokens=100,
        free_blocks=6,
    )
    metrics.observe_load(report, quarantined_blocks=1, leaked_blocks=2, block_tokens=16)
    read = samples(registry)
    assert read[("lamella_kv_blocks", (("state", "used"),))] == 1
    assert read[("lamella_kv_blocks", (("state", "free"),))] == 6
    assert read[("lamella_kv_blocks", (("state", "quarantined"),))] == 1
    assert read[("lamella_kv_blocks", (("state", "leaked"),))] == 2
    assert read[("lamella_kv_block_tokens", ())] == 16
    assert {role: read[("lamella_role", (("role", role),))] for role in ("prefill", "decode", "mixed")} == {
        "prefill": 1,
        "decode": 0,
        "mixed": 0,
    }
    assert read[("lamella_pass_tokens_sum", (("phase", "prefill"),))] == 128
    assert read[("lamella_prefill_compute_seconds_count", ())] == 1
    assert read[("lamella_transfer_bytes_total", ())] == 1 << 20
    assert read[("lamella_transfer_failures_total", ())] == 1
    assert read[("lamella_preemptions_total", ())] == 2
    assert read[("lamella_requests_running", ())] == 4
    assert read[("lamella_requests_waiting", (("room", "handover"),))] == 1
    assert read[("lamella_pending_prefill_tokens", ())] == 77
    assert read[("lamella_decode_tokens_total", ())] == 4
