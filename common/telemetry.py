"""What every process counts and measures, exported to Prometheus.

The latency definitions and their buckets are ``common.latency``'s; here they become histograms. One process
is one service with one registry. No label ever holds an id of a request or a user's text.

Histograms are written on the hot path (one observation a token at the gateway), so they are two additions
in the event loop's thread; the text is made when it is scraped.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from common.latency import (
    END_TO_END,
    QUEUE_PHASES,
    QUEUE_TIME,
    TBT,
    TPOT,
    TRANSFER_TIME,
    TTFT,
    LatencyMetric,
    RequestLatency,
    ServiceObjectives,
    has_met,
    is_within,
)
from common.messages import FinishReason, LoadReport
from common.nats_connection import BusCounters
from common.store import Store

LengthOutcome = Literal["answered", "absent", "timeout", "error", "skipped"]
"""Of a question to the length predictor: nobody serves, no answer in time, a refusal, or not even asked."""
SwapDirection = Literal["out", "in"]
DIRECTIONS = ["direction"]
LAG_INTERVAL_S = 0.25
"""How often the event loop's lag is sampled."""


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
        bus = self._bus
        for name, help_text, total in (
            ("bus_reconnects", "Connections to NATS made again.", bus.reconnects),
            ("bus_slow_consumer", "Messages lost because this process read too slowly.", bus.slow_consumer),
            ("bus_dropped", "Messages not sent because the outbox was full or closed.", bus.dropped),
            ("bus_malformed", "Messages that could not be decoded.", bus.malformed),
            ("bus_callback_failures", "Messages whose callback raised.", bus.callback_failures),
            ("store_malformed", "Records in the store that could not be decoded.", self._store.malformed),
        ):
            yield CounterMetricFamily(f"lamella_{name}", help_text, value=total)


def new_registry(kind: str) -> CollectorRegistry:
    """A registry with what every process exports: build, CPU, memory, file descriptors."""
    # A second series beside every counter, which says when this process first counted; nobody asks.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    build = Gauge("lamella_build_info", "What runs here.", ["version", "kind"], registry=registry)
    build.labels(_version(), kind).set(1)
    return registry


def export_count(registry: CollectorRegistry, name: str, help_text: str, count: Callable[[], int]) -> None:
    """A gauge that is asked on the event loop, whenever it is scraped."""
    Gauge(f"lamella_{name}", help_text, registry=registry).set_function(count)


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


class InstanceMetrics:
    """Prefill and decode rooms, the KV pool and its transfers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        count = _counter_factory(registry)
        self._queue = LatencyHistogram(QUEUE_TIME, registry, "phase", QUEUE_PHASES)
        self._transfer = LatencyHistogram(TRANSFER_TIME, registry)
        self._prefill_compute_s = count("prefill_compute_seconds", "Time from first chunk to first token.")
        self._prefill_tokens = count("prefill_tokens", "Prompt tokens computed.")
        self._prefill_chunks = count("prefill_chunks", "Chunks run.")
        self._chunk_s = count("prefill_busy_seconds", "Time the engine spent in chunks.")
        self._decode_tokens = count("decode_tokens", "Tokens drawn in decode steps.")
        self._decode_steps = count("decode_steps", "Decode steps run.")
        self._step_s = count("decode_busy_seconds", "Time the engine spent in decode steps.")
        self._preemptions = count("preemptions", "Sequences that lost their blocks to older ones.")
        self._left = count("sequences_left", "Sequences that this instance passed on to another.")
        self._moves = count("moves", "Running sequences moved to another attention worker.")
        self._move_bytes = count("move_bytes", "KV bytes moved with them.")
        self._move_s = count("move_seconds", "Time that they stood still for it.")
        self._move_failures = count("move_failures", "Moves that failed.")
        self._swaps = Counter(
            "lamella_swaps_total",
            "Sequences copied to the host tier or back.",
            DIRECTIONS,
            registry=registry,
        )
        self._swap_bytes = Counter(
            "lamella_swap_bytes_total", "KV bytes copied with them.", DIRECTIONS, registry=registry
        )
        self._swap_s = Counter(
            "lamella_swap_seconds_total", "Time that copying them took.", DIRECTIONS, registry=registry
        )
        self._transfer_bytes = count("transfer_bytes", "KV bytes sent.")
        self._transfer_s = count("transfer_seconds", "Time spent sending KV.")
        self._transfer_failures = count("transfer_failures", "KV transfers that failed.")
        self._blocks = Gauge("lamella_kv_blocks", "Blocks of the KV pool.", ["state"], registry=registry)
        self._running = Gauge("lamella_requests_running", "Sequences in decode steps.", registry=registry)
        self._waiting = Gauge("lamella_requests_waiting", "Waiting, by room.", ["room"], registry=registry)
        self._pending = Gauge(
            "lamella_pending_prefill_tokens", "Prompt tokens not yet computed.", registry=registry
        )
        self._length_error = Gauge(
            "lamella_length_error_tokens",
            "By how much sequences that outlived their predictions are to exceed them.",
            registry=registry,
        )
        self._batch_error = Gauge(
            "lamella_batch_error", "Sequences that outlived their predictions.", registry=registry
        )
        self._model_error = Gauge(
            "lamella_performance_model_relative_error",
            "Of what was predicted of the newest steps' time, the mean.",
            ["model"],
            registry=registry,
        )

    def observe_prefill(self, queue_s: float, compute_s: float) -> None:
        self._queue.observe(queue_s, "prefill")
        self._prefill_compute_s.inc(compute_s)

    def observe_chunk(self, chunk_tokens: int, elapsed_s: float) -> None:
        self._prefill_chunks.inc()
        self._prefill_tokens.inc(chunk_tokens)
        self._chunk_s.inc(elapsed_s)

    def observe_handover_queue(self, queue_s: float) -> None:
        self._queue.observe(queue_s, "handover")

    def observe_decode_queue(self, queue_s: float) -> None:
        self._queue.observe(queue_s, "decode")

    def observe_step(self, sequences: int, elapsed_s: float) -> None:
        self._decode_steps.inc()
        self._decode_tokens.inc(sequences)
        self._step_s.inc(elapsed_s)

    def observe_transfer(self, kv_bytes: int, elapsed_s: float) -> None:
        self._transfer.observe(elapsed_s)
        self._transfer_bytes.inc(kv_bytes)
        self._transfer_s.inc(elapsed_s)

    def transfer_failed(self) -> None:
        self._transfer_failures.inc()

    def observe_move(self, kv_bytes: int, elapsed_s: float) -> None:
        self._moves.inc()
        self._move_bytes.inc(kv_bytes)
        self._move_s.inc(elapsed_s)

    def move_failed(self) -> None:
        self._move_failures.inc()

    def observe_swap(self, direction: SwapDirection, kv_bytes: int, elapsed_s: float) -> None:
        self._swaps.labels(direction).inc()
        self._swap_bytes.labels(direction).inc(kv_bytes)
        self._swap_s.labels(direction).inc(elapsed_s)

    def left(self) -> None:
        self._left.inc()

    def preempted(self, sequences: int) -> None:
        self._preemptions.inc(sequences)

    def observe_load(self, report: LoadReport, quarantined_blocks: int) -> None:
        used = report.total_blocks - report.free_blocks - quarantined_blocks
        self._blocks.labels("free").set(report.free_blocks)
        self._blocks.labels("used").set(used)
        self._blocks.labels("quarantined").set(quarantined_blocks)
        self._running.set(report.decode_running)
        self._waiting.labels("prefill").set(report.pending_prefill_requests)
        self._waiting.labels("handover").set(report.handovers_waiting)
        self._waiting.labels("decode").set(report.decode_waiting)
        self._pending.set(report.pending_prefill_tokens)
        self._length_error.set(report.length_error_tokens)
        self._batch_error.set(report.batch_error)
        for model, fitted in (("chunk", report.chunk_time), ("step", report.step_time)):
            if fitted is not None:
                self._model_error.labels(model).set(fitted.relative_error)


class SchedulerMetrics:
    """Placement and the size of the mesh."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = LatencyHistogram(QUEUE_TIME, registry, "phase", ("placement",))
        self._instances = Gauge("lamella_instances", "Instances that are ready.", registry=registry)
        self._requests = Gauge("lamella_requests_placed", "Placed and not yet over.", registry=registry)
        self._rebalanced = Counter(
            "lamella_sequences_rebalanced_total",
            "Sequences asked to leave a decode instance that is expected to run out of memory.",
            registry=registry,
        )
        self._length_questions = Counter(
            "lamella_length_questions_total",
            "Asked of the length predictor; history's word holds where it did not answer.",
            ["outcome"],
            registry=registry,
        )

    def observe_placement(self, elapsed_s: float) -> None:
        self._queue.observe(elapsed_s, "placement")

    def asked_to_leave(self) -> None:
        self._rebalanced.inc()

    def asked_length(self, outcome: LengthOutcome) -> None:
        self._length_questions.labels(outcome).inc()

    def observe_mesh(self, instances: int, requests: int) -> None:
        self._instances.set(instances)
        self._requests.set(requests)


class LeaderMetrics:
    """Which scheduler leads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._epoch = Gauge(
            "lamella_leader_epoch", "With which this scheduler leads; 0: it does not.", registry=registry
        )

    def follow(self, epoch: Callable[[], int | None]) -> None:
        """Asks it whenever somebody reads."""
        self._epoch.set_function(lambda: float(epoch() or 0))


class ScalingMetrics:
    """How many workers of each service there are, and are wanted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._actual = Gauge("lamella_workers", "Ready workers.", ["service"], registry=registry)
        self._desired = Gauge(
            "lamella_workers_desired", "As the scheduler plans.", ["service"], registry=registry
        )

    def observe(self, service: str, actual: int, desired: int) -> None:
        self._actual.labels(service).set(actual)
        self._desired.labels(service).set(desired)


class PredictorMetrics:
    """How often, how fast and how rightly lengths are predicted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        count = _counter_factory(registry)
        self._predictions = count("length_predictions", "Answered.")
        self._seconds = count("length_prediction_seconds", "Time from question to answer.")
        self._refusals = count("length_prediction_refusals", "Not answered: too many questions at once.")
        self._outcomes = count("length_prediction_outcomes", "Answered, and the output came to its own end.")
        self._error_tokens = count(
            "length_prediction_error_tokens", "By how much the predicted means of these were wrong, in all."
        )

    def observe_prediction(self, elapsed_s: float) -> None:
        self._predictions.inc()
        self._seconds.inc(elapsed_s)

    def refused(self) -> None:
        self._refusals.inc()

    def observe_outcome(self, error_tokens: float) -> None:
        self._outcomes.inc()
        self._error_tokens.inc(abs(error_tokens))


class GatewayMetrics:
    """What the user sees: latencies, tokens and how requests end. ``classes``: of service, by name."""

    def __init__(self, registry: CollectorRegistry, classes: tuple[str, ...] = ("default",)) -> None:
        count = _counter_factory(registry)
        self.ttft = LatencyHistogram(TTFT, registry, "class", classes)
        self.tpot = LatencyHistogram(TPOT, registry, "class", classes)
        self.tbt = LatencyHistogram(TBT, registry)
        self.end_to_end = LatencyHistogram(END_TO_END, registry)
        self.prompt_tokens = count("prompt_tokens", "Tokens of accepted prompts.")
        self.generation_tokens = count("generation_tokens", "Tokens sent to clients.")
        self.disconnects = count("client_disconnects", "Clients that left before the end.")
        self.stream_gaps = count("stream_gaps", "Streams in which a token was missing.")
        self.continuations = Counter(
            "lamella_requests_resumed_total", "Sequences continued elsewhere.", ["cause"], registry=registry
        )
        self.open_requests = Gauge("lamella_open_requests", "Requests in the journal.", registry=registry)
        self._success = Counter(
            "lamella_request_success_total", "Choices that finished.", ["finish_reason"], registry=registry
        )
        self._responses = Counter(
            "lamella_http_responses_total", "Responses by status.", ["status"], registry=registry
        )

        self._judged = Counter(
            "lamella_requests_judged_total",
            "Choices that ended, failed or were refused; not those whose clients left.",
            ["class"],
            registry=registry,
        )
        self._met = Counter(
            "lamella_requests_within_objectives_total",
            "Of those judged, how many met an objective, or all: the rate of the latter is goodput.",
            ["class", "objective"],
            registry=registry,
        )
        self._met_tokens = Counter(
            "lamella_tokens_within_objectives_total",
            "Tokens of those that met all: the rate is goodput in tokens.",
            ["class"],
            registry=registry,
        )
        for each in classes:
            self._judged.labels(each)
            self._met_tokens.labels(each)

    def judge(
        self,
        service_class: str,
        objectives: ServiceObjectives,
        latency: RequestLatency | None,
        output_tokens: int,
    ) -> None:
        """One choice. Without a ``latency`` it was not served, and met nothing."""
        self._judged.labels(service_class).inc()
        if latency is None:
            return
        is_good = has_met(latency, objectives)
        for objective, is_met in (
            ("ttft", is_within(latency.ttft_s, objectives.ttft_s)),
            ("tpot", is_within(latency.tpot_s, objectives.tpot_s)),
            ("end_to_end", is_within(latency.end_to_end_s, objectives.end_to_end_s)),
            ("all", is_good),
        ):
            self._met.labels(service_class, objective).inc(is_met)
        self._met_tokens.labels(service_class).inc(output_tokens if is_good else 0)

    def finished(self, reason: FinishReason) -> None:
        self._success.labels(reason).inc()

    def responded(self, status: int) -> None:
        self._responses.labels(str(status)).inc()


def _counter_factory(registry: CollectorRegistry) -> Callable[[str, str], Counter]:
    return lambda name, help_text: Counter(f"lamella_{name}_total", help_text, registry=registry)


def _version() -> str:
    try:
        return version("lamella")
    except PackageNotFoundError:
        return "source"
