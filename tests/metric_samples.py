"""What a registry holds, as Prometheus would read it."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]


def samples(registry: Collector) -> dict[tuple[str, Labels], float]:
    """By name and labels, the labels in order."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
