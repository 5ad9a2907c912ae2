"""Which kinds of instances are worth a whole simulation: bounded in closed form, then measured on samples of
the trace, on longer ones the fewer are left.

A kind whose bound costs more than the best few cost already is left out unseen. Of the others one probe at
the rate that it would have to reach is mostly enough. Samples are short at first and flatter: what piles up
slowly is not seen in them, so their winners are measured again, and whole deployments over the whole trace.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from services.planner.bounds import Bound
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.demand import Demand, Measured
from services.planner.goodput import FINE, Capacity, find_capacity, served_by
from services.planner.probes import Phase, Search, Tally, together
from services.planner.samples import Sample

ROUND = 8
"""Kinds that are measured at once, however many cores there are: what is pruned must not hang on those."""
KEPT = 4
"""Of each role go on to the longer samples."""
LONGER = 2.5
"""Times the first samples."""
FLATTERY = 0.93
"""Of what a short sample says a long one may hold: kinds that close to the best ones are kept."""


@dataclass(frozen=True, slots=True)
class Screened:
    """``measured``: best first. ``bounded``: left out by their bounds; ``cut``: by a probe or few."""

    measured: tuple[Measured, ...]
    bounded: int
    cut: int


def screen(
    kinds: Sequence[InstanceKind],
    bounds: Mapping[InstanceKind, Bound],
    demand: Demand,
    most_requests: int,
    looked_at: Tally,
) -> Search[Screened]:
    """The best few kinds of one role, each with what one instance of it serves. ``looked_at`` counts the
    kinds of all roles: those that go on to the longer sample once they were measured there."""
    order = sorted(
        representatives(kinds, bounds), key=lambda kind: (demand.burden(kind, bounds[kind].rate_per_s), kind)
    )
    short: list[Measured] = []
    looked = counted = 0
    while looked < len(order):
        worst = _kth_burden(short, demand)
        batch = [
            kind
            for kind in order[looked : looked + ROUND]
            if demand.burden(kind, bounds[kind].rate_per_s) <= worst and bounds[kind].rate_per_s > 0
        ]
        looked += ROUND
        if not batch:
            break
        found = yield from together(
            [_measure(kind, bounds[kind], demand, most_requests, worst, 1.0) for kind in batch]
        )
        short.extend(Measured(kind, each) for kind, each in zip(batch, found, strict=True))
        looked_at.add(max(0, len(short) - 2 * KEPT) - counted)
        counted = max(0, len(short) - 2 * KEPT)
    seen = len(short)
    kept = _best(short, demand)[: 2 * KEPT]
    looked_at.add(len(kinds) - len(kept) - counted)
    longer = yield from together(
        [
            _measure(each.kind, bounds[each.kind], demand, most_requests, math.inf, LONGER, each.capacity)
            for each in kept
        ]
    )
    looked_at.add(len(kept))
    final = [Measured(each.kind, capacity) for each, capacity in zip(kept, longer, strict=True)]
    return Screened(tuple(_best(final, demand)[:KEPT]), len(kinds) - seen, seen - len(kept))


def representatives(
    kinds: Sequence[InstanceKind], bounds: Mapping[InstanceKind, Bound]
) -> list[InstanceKind]:
    """Of kinds that differ in ``max_decode_batch`` alone and whose bounds are the same, that batch is not
    what binds: the one with the largest stands for all."""
    found: dict[tuple[InstanceKind, Bound], InstanceKind] = {}
    for kind in sorted(kinds):
        alike = msgspec.structs.replace(kind, max_decode_batch=0)
        found[alike, bounds[kind]] = kind
    return list(found.values())


def _kth_burden(short: Sequence[Measured], demand: Demand) -> float:
    best = _best(short, demand)
    if len(best) < KEPT:
        return math.inf
    return demand.burden(best[KEPT - 1].kind, FLATTERY * best[KEPT - 1].rate_per_s)


def _best(measured: Sequence[Measured], demand: Demand) -> list[Measured]:
    """Those that serve at all; of equal ones that with more to spare, then by what it is."""
    return sorted(
        (each for each in measured if each.rate_per_s > 0 and not each.capacity.is_cut),
        key=lambda each: (
            demand.burden(each.kind, each.rate_per_s),
            demand.unit(each.kind) / each.rate_per_s,
            each.kind,
        ),
    )


def _measure(
    kind: InstanceKind,
    bound: Bound,
    demand: Demand,
    most_requests: int,
    worst: float,
    length: float,
    before: Capacity | None = None,
) -> Search[Capacity]:
    phase: Phase = "whole" if kind.role == "mixed" else kind.role
    pools = (PoolPlan(kind=kind, count=1),)

    probe_at = Sample(most_requests, length).of(pools, bound.sojourn_s, phase)
    served = served_by(demand.goal)
    whole = None if demand.objective == "throughput" else demand.rate_per_s
    if before is None:
        least = demand.needed_per_s(kind, worst)
        found = yield from find_capacity(probe_at, served, bound.rate_per_s, least=least, whole_of=whole)
        return found
    low = before.rate_per_s if whole else FLATTERY * before.rate_per_s
    found = yield from find_capacity(
        probe_at, served, bound.rate_per_s, low=low, tolerance=FINE, whole_of=whole
    )
    return found
