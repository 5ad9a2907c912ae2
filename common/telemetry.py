"""How every process counts and measures, and what each of them exports to Prometheus.

What a room counts of its own stands with it (``gateway.metrics``, ``scheduler.metrics``; prefill and decode
share ``common.instance_metrics``). The latency definitions and their buckets are ``common.latency``'s; here
they become histograms. One process is one service with one registry. No label ever holds an id of a request
or a user's text.

Histograms are written on the hot path (one observation a token at the gateway), so they are two additions
in the event loop's thread; the text is made when it is scraped.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from common.latency import LatencyMetric
from common.nats_connection import BusCounters
from common.release import installed_version
from common.store import Store

LAG_INTERVAL_S = 0.25
"""How often the event loop's lag is sampled."""
TOKEN_COUNT_BOUNDS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip


class LatencyHistogram(Collector):
    """One metric of ``common.latency``, optionally split by the values of one label.

    Written and read in the event loop's thread only.
    """

    def __init__(
        self,
        metric: LatencyMetric,
        registry: CollectorRegistry,
        label: str | None = None,
        values: tuple[str, ...] = ("",),
    ) -> None:
        self._metric = metric
        self._label = label
        self._bounds_s = metric.bounds_s
        self._counts = {value: [0] * (len(metric.bounds_s) + 1) for value in values}
        self._sums_s = dict.fromkeys(values, 0.0)
        registry.register(self)

    def observe(self, seconds: float, value: str = "") -> None:
        self._counts[value][bisect_left(self._bounds_s, seconds)] += 1
        self._sums_s[value] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        labels = [] if self._label is None else [self._label]
        family = HistogramMetricFamily(self._metric.name, self._metric.documentation, labels=labels)
        for value, counts in self._counts.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound_s, count in zip((*self._bounds_s, float("inf")), counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound_s == float("inf") else str(bound_s), total))
            family.add_metric([value] if labels else [], buckets, self._sums_s[value])
        yield family


class WireCounters(Collector):
    """The totals that bus and store keep themselves."""

    def __init__(self, bus: BusCounters, store: Store, registry: CollectorRegistry) -> None:
        self._bus = bus
        self._store = store
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        bus, store = self._bus, self._store
        for name, help_text, total in (
            ("bus_reconnects", "Connections to NATS made again.", bus.reconnects),
            ("bus_slow_consumer", "Messages lost because this process read too slowly.", bus.slow_consumer),
            ("bus_dropped", "Messages not sent because the outbox was full or closed.", bus.dropped),
            ("bus_malformed", "Messages that could not be decoded.", bus.malformed),
            ("bus_callback_failures", "Messages whose callback raised.", bus.callback_failures),
            ("store_operations", "Answers of Redis, of one round trip or some.", store.answered),
            ("store_operation_seconds", "Time that Redis took for them.", store.answered_s),
            ("store_failures", "Questions that Redis did not answer, or refused.", store.failures),
            ("store_malformed", "Records in the store that could not be decoded.", store.malformed),
        ):
            yield CounterMetricFamily(f"lamella_{name}", help_text, value=total)


def new_registry(kind: str) -> CollectorRegistry:
    """A registry with what every process exports: build, CPU, memory, file descriptors."""
    # A second series beside every counter, which says when this process first counted; nobody asks.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    build = Gauge("lamella_build_info", "What runs here.", ["version", "kind"], registry=registry)
    build.labels(installed_version(), kind).set(1)
    return registry


@dataclass(frozen=True, slots=True)
class Instruments:
    """Makes what one registry shows: ``lamella_NAME``, with ``_total`` at its end where it only grows."""

    registry: CollectorRegistry

    def count(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"lamella_{name}_total", help_text, labels, registry=self.registry)

    def gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"lamella_{name}", help_text, labels, registry=self.registry)


def export_model(registry: CollectorRegistry, model_name: str) -> None:
    """Which model this process serves, for dashboards to choose by."""
    Gauge("lamella_model_info", "Which model is served.", ["model_name"], registry=registry).labels(
        model_name
    ).set(1)


def token_histogram(
    registry: CollectorRegistry, name: str, help_text: str, labels: tuple[str, ...] = ()
) -> Histogram:
    """How many tokens something has; observed once a request or once a run of the model."""
    return Histogram(f"lamella_{name}", help_text, labels, buckets=TOKEN_COUNT_BOUNDS, registry=registry)


def export_count(registry: CollectorRegistry, name: str, help_text: str, count: Callable[[], int]) -> None:
    """A gauge that is asked on the event loop, whenever it is scraped."""
    Gauge(f"lamella_{name}", help_text, registry=registry).set_function(count)


class TotalCollector(Collector):
    """A total that somebody else keeps."""

    def __init__(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        self._name, self._help_text, self._read = name, help_text, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help_text, value=self._read())


def export_total(registry: CollectorRegistry, name: str, help_text: str, read: Callable[[], float]) -> None:
    """A counter that is read on the event loop, whenever it is scraped."""
    registry.register(TotalCollector(f"lamella_{name}", help_text, read))


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one set of labels' values: how many observations, and their total."""

    labels: tuple[str, ...]
    count: int
    total: float


class SumsCollector(Collector):
    """Observations that somebody else counts and adds up."""

    def __init__(
        self, name: str, help_text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sums]]
    ) -> None:
        self._name, self._help_text, self._labels, self._read = name, help_text, labels, read

    def collect(self) -> Iterator[SummaryMetricFamily]:
        family = SummaryMetricFamily(self._name, self._help_text, labels=self._labels)
        for each in self._read():
            family.add_metric(each.labels, each.count, each.total)
        yield family


def export_sums(
    registry: CollectorRegistry,
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    read: Callable[[], Iterable[Sums]],
) -> None:
    """Sum and count by labels, read on the event loop whenever they are scraped."""
    registry.register(SumsCollector(f"lamella_{name}", help_text, labels, read))


async def sample_loop_lag(registry: CollectorRegistry) -> None:
    """Measures how late the event loop's timers fire. Runs until cancelled."""
    lag = Gauge("lamella_event_loop_lag_seconds", "Lateness of the last timer.", registry=registry)
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lag.set(max(0.0, loop.time() - due_s))
