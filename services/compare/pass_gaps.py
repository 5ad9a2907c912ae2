"""How long a mesh's models rest between passes that follow on one another, as its instances count it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from services.asking import NoAnswer, fetch
from services.compare.host_costs import costs_of
from services.compare.records import RunRecord

APART = 4.0
"""Times as many tokens a pass as another run."""
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


class Rests(NamedTuple):
    """How long a model rests before a pass, and more for each token that it draws, seconds."""

    pass_s: float
    token_s: float


def rests_of(runs: Sequence[RunRecord]) -> Rests:
    """By least squares over these runs, of which each counted some: an event loop takes each token to whoever
    asked for it. Runs that draw about as many tokens a pass as each other do not tell the two apart: then it
    is all passes'."""
    tokens = [sum(each.output_tokens - 1 for each in run.served) for run in runs]
    per_pass = [drawn / run.gaps for drawn, run in zip(tokens, runs, strict=True)]
    taken_s = [run.gap_s for run in runs]
    if max(per_pass) < APART * min(per_pass):
        return Rests(sum(taken_s) / sum(run.gaps for run in runs), 0.0)
    return Rests(*costs_of([[run.gaps, drawn] for drawn, run in zip(tokens, runs, strict=True)], taken_s))


def _counted(metrics: str) -> Gaps:
    totals = {PASSES: 0.0, SECONDS: 0.0}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return Gaps(round(totals[PASSES]), totals[SECONDS])
