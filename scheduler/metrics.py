"""What a scheduler counts: its placements, the size of the mesh, who leads, how many workers are wanted."""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from common.latency import QUEUE_TIME
from common.telemetry import Instruments, LatencyHistogram

LengthOutcome = Literal["answered", "absent", "timeout", "error", "skipped"]
"""Of a question to the length predictor: nobody serves, no answer in time, a refusal, or not even asked."""


class SchedulerMetrics:
    """Placement and the size of the mesh."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = LatencyHistogram(QUEUE_TIME, registry, "phase", ("placement",))
        make = Instruments(registry)
        self._instances = make.gauge("instances", "Instances that are ready.")
        self._requests = make.gauge("requests_placed", "Placed and not yet over.")
        self._waiting = make.gauge("requests_waiting", "Waiting, by room.", "room")
        self._rebalanced = make.count(
            "sequences_rebalanced",
            "Sequences asked to leave a decode instance that is expected to run out of memory.",
        )
        self._length_questions = make.count(
            "length_questions",
            "Asked of the length predictor; history's word holds where it did not answer.",
            "outcome",
        )
        self._kv_links_broken = make.gauge(
            "kv_links_broken", "Pairs of instances between which KV has not got through since it did not."
        )
        self._lifelines = make.gauge(
            "lifelines", "Instances and attention workers whose process's end is seen at once."
        )
        for outcome in get_args(LengthOutcome):
            self._length_questions.labels(outcome)

    def observe_placement(self, elapsed_s: float) -> None:
        self._queue.observe(elapsed_s, "placement")

    def asked_to_leave(self) -> None:
        self._rebalanced.inc()

    def asked_length(self, outcome: LengthOutcome) -> None:
        self._length_questions.labels(outcome).inc()

    def observe_links(self, broken: int) -> None:
        self._kv_links_broken.set(broken)

    def follow_lifelines(self, count: Callable[[], int]) -> None:
        """Asks it whenever somebody reads."""
        self._lifelines.set_function(lambda: float(count()))

    def observe_mesh(self, instances: int, requests: int, waiting: int) -> None:
        """``waiting``: placed nowhere yet (``scheduler.waiting_room``)."""
        self._instances.set(instances)
        self._requests.set(requests)
        self._waiting.labels("scheduler").set(waiting)


class LeaderMetrics:
    """Which scheduler leads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._epoch = Instruments(registry).gauge(
            "leader_epoch", "With which this scheduler leads; 0: it does not."
        )

    def follow(self, epoch: Callable[[], int | None]) -> None:
        """Asks it whenever somebody reads."""
        self._epoch.set_function(lambda: float(epoch() or 0))


class ScalingMetrics:
    """How many workers of each service there are, and are wanted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Instruments(registry)
        self._actual = make.gauge("workers", "Ready workers.", "service")
        self._desired = make.gauge("workers_desired", "As the scheduler plans.", "service")

    def observe(self, service: str, actual: int, desired: int) -> None:
        self._actual.labels(service).set(actual)
        self._desired.labels(service).set(desired)
