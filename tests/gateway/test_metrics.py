"""What a gateway shows of the promises that it kept."""

from prometheus_client import CollectorRegistry

from common.latency import RequestLatency, ServiceObjectives
from gateway.metrics import GatewayMetrics
from tests.metric_samples import samples


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


def test_what_is_known_beforehand_begins_at_zero() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry, ("default", "batch"))
    begun = {
        (name, tuple(value for _, value in labels))
        for (name, labels), count in samples(registry).items()
        if count == 0
    }
    for expected in (
        ("lamella_requests_judged_total", ("batch",)),
        ("lamella_requests_within_objectives_total", ("batch", "all")),
        ("lamella_requests_within_objectives_total", ("default", "ttft")),
        ("lamella_requests_refused_total", ("overloaded",)),
        ("lamella_requests_resumed_total", ("instance_lost",)),
        ("lamella_request_success_total", ("stop",)),
    ):
        assert expected in begun
