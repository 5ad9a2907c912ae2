"""What a scheduler counts: its placements, the size of the mesh, who leads, how many workers are wanted."""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from common.latency import QUEUE_TIME
from common.telemetry import LatencyHistogram

LengthOutcome = Literal["answered", "absent", "timeout", "error", "skipped"]
"""Of a question to the length predictor: nobody serves, no answer in time, a refusal, or not even asked."""


class SchedulerMetrics:
    """Placement and the size of the mesh."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = LatencyHistogram(QUEUE_TIME, registry, "phase", ("placement",))
        self._instances = Gauge("lamella_instances", "Instances that are ready.", registry=registry)
        self._requests = Gauge("lamella_requests_placed", "Placed and not yet over.", registry=registry)
        self._waiting = Gauge("lamella_requests_waiting", "Waiting, by room.", ["room"], registry=registry)
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
        for outcome in get_args(LengthOutcome):
            self._length_questions.labels(outcome)

    def observe_placement(self, elapsed_s: float) -> None:
        self._queue.observe(elapsed_s, "placement")

    def asked_to_leave(self) -> None:
        self._rebalanced.inc()

    def asked_length(self, outcome: LengthOutcome) -> None:
        self._length_questions.labels(outcome).inc()

    def observe_mesh(self, instances: int, requests: int, waiting: int) -> None:
        """``waiting``: placed nowhere yet (``scheduler.waiting_room``)."""
        self._instances.set(instances)
        self._requests.set(requests)
        self._waiting.labels("scheduler").set(waiting)


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
