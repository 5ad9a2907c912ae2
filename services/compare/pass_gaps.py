"""How long a mesh's models rest between passes that follow on one another, as its instances count it."""

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from services.asking import fetch

PASSES, SECONDS = "lamella_pass_gaps_total", "lamella_pass_gap_seconds_total"


class Gaps(NamedTuple):
    """Before so many passes, and their seconds together."""

    passes: int = 0
    seconds: float = 0.0


def gaps_of(instance_urls: Iterable[str]) -> dict[str, Gaps]:
    """Since each began, by its URL. Raises NoAnswer."""
    return {url: _counted(fetch(f"{url}/metrics").decode()) for url in instance_urls}


def gaps_between(before: dict[str, Gaps], after: dict[str, Gaps]) -> Gaps:
    """Of those together that did not begin anew meanwhile."""
    passes, seconds = 0, 0.0
    for url, late in after.items():
        early = before.get(url, Gaps())
        if late.passes >= early.passes:
            passes += late.passes - early.passes
            seconds += late.seconds - early.seconds
    return Gaps(passes, seconds)


def _counted(metrics: str) -> Gaps:
    totals = {PASSES: 0.0, SECONDS: 0.0}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return Gaps(round(totals[PASSES]), totals[SECONDS])
