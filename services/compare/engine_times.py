"""What a mesh's engines do with their time in a run: compute, wait for a core amid passes, and rest between
those that follow on one another, as the system and the instances count it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.asking import NoAnswer, fetch
from services.compare.usage import computing_s

GAPS, GAP_S = "lamella_pass_gaps_total", "lamella_pass_gap_seconds_total"
TOKENS, WAIT_S = "lamella_pass_gap_tokens_total", "lamella_pass_wait_seconds_total"


class PassCounts(NamedTuple):
    """How many passes followed on another one, and how long models rested before them; ``prompts`` and
    ``decodes``: tokens that the passes before drew. ``waited_s``: of all passes, in which their engines'
    threads did not run."""

    gaps: int = 0
    gap_s: float = 0.0
    prompts: int = 0
    decodes: int = 0
    waited_s: float = 0.0


class EngineTimes(msgspec.Struct, frozen=True):
    """Of the engines of one role in a run, together. ``computed_s``: processor time. ``passes``: where
    instances compute their own attention."""

    role: str
    computed_s: float
    passes: PassCounts | None = None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """``url``: where its passes are counted."""

    role: str
    pid: int
    url: str | None = None


class Counted(NamedTuple):
    """Of a process, since it began."""

    computed_s: float
    passes: PassCounts | None = None


def counted_of(processes: Iterable[EngineProcess]) -> dict[EngineProcess, Counted]:
    """Who does not answer is left out."""
    found = {}
    for each in processes:
        with suppress(NoAnswer):
            passes = None if each.url is None else _counts_in(fetch(f"{each.url}/metrics").decode())
            found[each] = Counted(computing_s([each.pid]), passes)
    return found


def times_between(
    before: Mapping[EngineProcess, Counted], after: Mapping[EngineProcess, Counted]
) -> tuple[EngineTimes, ...]:
    """By role, of those that were there both times."""
    by_role: dict[str, list[tuple[Counted, Counted]]] = defaultdict(list)
    for each in sorted(before.keys() & after.keys(), key=lambda one: (one.role, one.pid)):
        by_role[each.role].append((before[each], after[each]))
    return tuple(_times(role, pairs) for role, pairs in by_role.items())


def _times(role: str, pairs: Sequence[tuple[Counted, Counted]]) -> EngineTimes:
    counted = [
        _between(early.passes, late.passes)
        for early, late in pairs
        if early.passes is not None and late.passes is not None
    ]
    return EngineTimes(
        role,
        sum(late.computed_s - early.computed_s for early, late in pairs),
        counts_of_all(counted) if counted else None,
    )


def counts_of_all(counts: Iterable[PassCounts]) -> PassCounts:
    found = list(counts)
    return PassCounts(
        sum(each.gaps for each in found),
        sum(each.gap_s for each in found),
        sum(each.prompts for each in found),
        sum(each.decodes for each in found),
        sum(each.waited_s for each in found),
    )


def _between(early: PassCounts, late: PassCounts) -> PassCounts:
    """None of one that began anew meanwhile."""
    between = PassCounts(
        late.gaps - early.gaps,
        late.gap_s - early.gap_s,
        late.prompts - early.prompts,
        late.decodes - early.decodes,
        late.waited_s - early.waited_s,
    )
    return between if min(between) >= 0 else PassCounts()


def _counts_in(metrics: str) -> PassCounts:
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.labels["phase"] if sample.name == TOKENS else sample.name
            totals[name] += sample.value
    return PassCounts(
        round(totals[GAPS]),
        totals[GAP_S],
        round(totals["prefill"]),
        round(totals["decode"]),
        totals[WAIT_S],
    )
