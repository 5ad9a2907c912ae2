"""How long a mesh's models rest between passes that follow on one another, as its instances count it."""

import urllib.request
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0


class Gaps(NamedTuple):
    """Before so many passes so far, and their seconds together."""

    passes: int
    seconds: float

    def since(self, before: "Gaps") -> "Gaps":
        return Gaps(self.passes - before.passes, self.seconds - before.seconds)


def gaps_of(instance_urls: Iterable[str]) -> Gaps:
    """Of all of them. Raises OSError where one does not answer."""
    totals = {"lamella_pass_gaps_total": 0.0, "lamella_pass_gap_seconds_total": 0.0}
    for url in instance_urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in totals:
                    totals[sample.name] += sample.value
    passes, seconds = totals.values()
    return Gaps(round(passes), seconds)
