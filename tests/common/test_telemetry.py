"""Metrics as Prometheus reads them."""

import asyncio
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.ids import Incarnation, InstanceId
from common.latency import LATENCY_METRICS, QUEUE_PHASES, QUEUE_TIME, TTFT, RequestLatency, ServiceObjectives
from common.messages import LoadReport
from common.nats_connection import BusCounters
from common.store import Store
from common.telemetry import (
    GatewayMetrics,
    InstanceMetrics,
    LatencyHistogram,
    SchedulerMetrics,
    WireCounters,
    new_registry,
)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(st.lists(st.floats(min_value=0, max_value=1e4), max_size=50))
def test_a_histogram_counts_every_observation_in_the_first_bucket_that_holds_it(seconds: list[float]) -> None:
    registry = CollectorRegistry()
    histogram = LatencyHistogram(TTFT, registry)
    for each in seconds:
        histogram.observe(each)
    read = samples(registry)
    for bound_s in TTFT.bounds_s:
        expected = sum(each <= bound_s for each in seconds)
        assert read[(f"{TTFT.name}_bucket", (("le", str(bound_s)),))] == expected
    assert read[(f"{TTFT.name}_bucket", (("le", "+Inf"),))] == len(seconds)
    assert read[(f"{TTFT.name}_count", ())] == len(seconds)
    assert read[(f"{TTFT.name}_sum", ())] == pytest.approx(sum(seconds))


def test_queue_times_are_kept_apart_by_phase_and_unknown_phases_refused() -> None:
    registry = CollectorRegistry()
    histogram = LatencyHistogram(QUEUE_TIME, registry, "phase", QUEUE_PHASES)
    histogram.observe(0.2, "decode")
    read = samples(registry)
    assert read[(f"{QUEUE_TIME.name}_count", (("phase", "decode"),))] == 1
    assert read[(f"{QUEUE_TIME.name}_count", (("phase", "prefill"),))] == 0
    with pytest.raises(KeyError):
        histogram.observe(0.2, "lunch")


def test_bounds_are_in_order_so_that_bisection_finds_the_bucket() -> None:
    for metric in LATENCY_METRICS:
        assert list(metric.bounds_s) == sorted(set(metric.bounds_s))
        assert bisect_left(metric.bounds_s, 0.0) == 0


def test_an_instance_shows_its_pool_its_queues_and_its_work() -> None:
    registry = new_registry("prefill")
    metrics = InstanceMetrics(registry)
    metrics.observe_chunk(128, 0.5)
    metrics.observe_prefill(0.01, 0.5)
    metrics.observe_step(4, 0.02)
    metrics.observe_transfer(1 << 20, 0.1)
    metrics.transfer_failed()
    metrics.preempted(2)
    report = LoadReport(
        instance_id=InstanceId("i"),
        incarnation=Incarnation("1"),
        sequence=1,
        role="prefill",
        is_draining=False,
        pending_prefill_tokens=77,
        pending_prefill_requests=3,
        handovers_waiting=1,
        decode_running=4,
        decode_waiting=2,
        decode_tokens=100,
        total_blocks=10,
        largest_pool_blocks=10,
        free_blocks=6,
    )
    metrics.observe_load(report, quarantined_blocks=1)
    read = samples(registry)
    assert read[("lamella_kv_blocks", (("state", "used"),))] == 3
    assert read[("lamella_kv_blocks", (("state", "free"),))] == 6
    assert read[("lamella_kv_blocks", (("state", "quarantined"),))] == 1
    assert read[("lamella_transfer_bytes_total", ())] == 1 << 20
    assert read[("lamella_transfer_failures_total", ())] == 1
    assert read[("lamella_preemptions_total", ())] == 2
    assert read[("lamella_requests_running", ())] == 4
    assert read[("lamella_requests_waiting", (("room", "handover"),))] == 1
    assert read[("lamella_pending_prefill_tokens", ())] == 77
    assert read[("lamella_decode_tokens_total", ())] == 4


def test_every_kind_of_service_exports_names_that_do_not_collide() -> None:
    async def work() -> None:
        for metrics in (InstanceMetrics, SchedulerMetrics, GatewayMetrics):
            registry = new_registry("kind")
            metrics(registry)
            counters = BusCounters(reconnects=2, slow_consumer=3)
            WireCounters(counters, Store("redis://127.0.0.1:1", "n"), registry)
            read = samples(registry)
            assert read[("lamella_bus_reconnects_total", ())] == 2
            assert read[("lamella_bus_slow_consumer_total", ())] == 3
            assert ("process_open_fds", ()) in read
            assert not any(name.endswith("_created") for name, _ in read)

    asyncio.run(work())


def test_requests_are_judged_by_every_objective_and_refused_ones_meet_none() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, ("default", "batch"))
    objectives = ServiceObjectives(ttft_s=1.0, tpot_s=0.1, end_to_end_s=3.0)
    for ttft_s, tpot_s in ((0.5, 0.05), (0.5, 0.2), (2.0, 0.05), (0.5, None)):
        metrics.judge("default", objectives, RequestLatency(ttft_s, tpot_s, None, ttft_s + 1.5), 10)
    metrics.judge("default", objectives, None, 3)
    metrics.judge("batch", ServiceObjectives(), RequestLatency(9.0, 9.0, None, 99.0), 7)
    read = samples(registry)

    def of(name: str, *labels: tuple[str, str]) -> float:
        return read[(f"lamella_{name}", tuple(sorted(labels)))]

    met = {
        objective: of("requests_within_objectives_total", ("class", "default"), ("objective", objective))
        for objective in ("ttft", "tpot", "end_to_end", "all")
    }
    assert met == {"ttft": 3, "tpot": 3, "end_to_end": 3, "all": 2}
    assert of("requests_judged_total", ("class", "default")) == 5
    assert of("tokens_within_objectives_total", ("class", "default")) == 20
    assert of("tokens_within_objectives_total", ("class", "batch")) == 7
