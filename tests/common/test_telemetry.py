"""Metrics as Prometheus reads them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from common.errors import StoreUnavailable
from common.instance_metrics import InstanceMetrics
from common.latency import QUEUE_TIME, TTFT
from common.nats_connection import BusCounters
from common.store import Store
from common.telemetry import LatencyHistogram, WireCounters, new_registry
from gateway.metrics import GatewayMetrics
from scheduler.metrics import SchedulerMetrics
from tests.metric_samples import samples


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
    histogram = LatencyHistogram(QUEUE_TIME, registry, "phase", ("prefill", "decode"))
    histogram.observe(0.2, "decode")
    read = samples(registry)
    assert read[(f"{QUEUE_TIME.name}_count", (("phase", "decode"),))] == 1
    assert read[(f"{QUEUE_TIME.name}_count", (("phase", "prefill"),))] == 0
    with pytest.raises(KeyError):
        histogram.observe(0.2, "lunch")


@pytest.mark.anyio
async def test_what_redis_answered_and_failed_to_is_counted_with_the_time_it_took(
    redis_url: str, namespace: str
) -> None:
    store, gone = Store(redis_url, namespace), Store("redis://127.0.0.1:1", namespace)
    try:
        for _ in range(3):
            await store.members()
        with pytest.raises(StoreUnavailable):
            await gone.members()
    finally:
        await store.close()
        await gone.close()
    told = []
    for each in (store, gone):
        registry = CollectorRegistry()
        WireCounters(BusCounters(), each, registry)
        told.append(samples(registry))
    names = ("store_operations", "store_failures")
    assert [told[0][(f"lamella_{name}_total", ())] for name in names] == [3, 0]
    assert [told[1][(f"lamella_{name}_total", ())] for name in names] == [0, 1]
    assert told[0][("lamella_store_operation_seconds_total", ())] > 0


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
