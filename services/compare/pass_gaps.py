"""How long a mesh's models rest between passes that follow on one another, as its instances count it."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from services.asking import NoAnswer, fetch

PASSES, SECONDS = "lamella_pass_gaps_total", "lamella_pass_gap_seconds_total"


class Gaps(NamedTuple):
    """Before so many passes, and their seconds together."""

    passes: int = 0
    seconds: float = 0.0


def gaps_of(instance_urls: Iterable[str]) -> dict[str, Gaps]:
    """Since each began, by its URL; who does not answer is left out."""
    found = {}
    for url in instance_urls:
        with suppress(NoAnswer):
            found[url] = _counted(fetch(f"{url}/metrics").decode())
    return found


def gaps_between(before: Mapping[str, Gaps], after: Mapping[str, Gaps]) -> Gaps:
    """Of those together that were there both times, and did not begin anew meanwhile."""
    passes, seconds = 0, 0.0
    for url in before.keys() & after.keys():
        early, late = before[url], after[url]
        if late.passes >= early.passes and late.seconds >= early.seconds:
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
