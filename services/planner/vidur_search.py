"""Vidur-Search (sections 6 and 7.3): queries per second and dollar of every configuration of an instance.

The capacity of one is the highest rate whose requests wait at most ``DELAY_S`` for their first chunk, at the
99th percentile; what first tokens and gaps take is measured there. Objectives filter afterwards, so that the
picture shows what a little more patience would save. Where the best alone is asked for, a rate has to keep
them, too, and kinds that cannot be it are left out by their bounds, or by one run at the rate that they would
have to reach."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from common.cost import SECONDS_PER_HOUR
from common.devices import Catalogue
from common.latency import REPORTED_PERCENTILES, ServiceObjectives, is_within
from services.planner.bounds import Bound
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.goodput import COARSE, FINE, Served, find_capacity
from services.planner.probes import Point, Search, Tally, Tell, together, untold
from services.planner.samples import Sample
from services.planner.screening import representatives

DELAY_S = 5.0
KEPT = 3
"""Of the best alone: kinds that are measured again, on the longer sample."""
LEAST_SHARE = 0.5
"""Of its bound: what keeps the objectives below it alone is not the best of a space."""
CLOSE = 0.97
"""Of the best on the shorter one: who serves less of it is not looked at further."""
P90 = 1
"""Of a point's (50, 90, 99)."""
TBT_P99 = REPORTED_PERCENTILES.index(99.0)
MOST_LOST = 0.01
"""Requests that are refused wait for ever: no more than the percentile leaves out."""
NO_OBJECTIVES = ServiceObjectives()
Latencies = tuple[float, float, float, float]
"""As ``VidurPoint`` has them, s."""


@dataclass(frozen=True, slots=True)
class VidurPoint:
    """Of one kind at its capacity. ``requests_per_usd``: a second's, over a second's dollars."""

    kind: InstanceKind
    capacity_per_s: float
    requests_per_usd: float
    ttft_p90_s: float
    tbt_p99_s: float
    tpot_p90_s: float
    end_to_end_p90_s: float


@dataclass(frozen=True, slots=True)
class VidurBest:
    """``points``: of the best kinds that keep the objectives, best first. ``kinds``: that were searched, of
    which ``simulated`` were run at all."""

    points: tuple[VidurPoint, ...]
    kinds: int
    simulated: int


def has_short_queue(point: Point) -> bool:
    if point.queue_p99_s is None:
        return False
    return point.queue_p99_s <= DELAY_S and point.done_share >= 1 - MOST_LOST


def search_capacities(
    kinds: Sequence[InstanceKind],
    bounds: Mapping[InstanceKind, Bound],
    catalogue: Catalogue,
    sample: Sample,
    objectives: ServiceObjectives = NO_OBJECTIVES,
    tell: Tell = untold,
) -> Search[list[VidurPoint]]:
    """Best first. ``objectives``: that a rate has to keep, too."""
    served = partial(_is_served, objectives=objectives)
    found = yield from together(
        [_measure(kind, bounds[kind], catalogue, sample, served) for kind in kinds],
        Tally(tell, "kinds of instances measured", len(kinds)),
    )
    return in_order(found)


def search_best(
    kinds: Sequence[InstanceKind],
    bounds: Mapping[InstanceKind, Bound],
    catalogue: Catalogue,
    objectives: ServiceObjectives,
    short: Sample,
    long: Sample,
) -> Search[VidurBest]:
    """The kinds that serve the most for a dollar ``within`` objectives, each at the highest rate that keeps
    them and a short queue. One after the other, from the highest bound on, on ``short`` samples; those close
    to the best there again, on ``long`` ones. One that does not keep them at ``LEAST_SHARE`` of its bound is
    none of them."""
    usd_s = {kind: usd_per_s(kind, catalogue) for kind in kinds}
    order = sorted(
        representatives(kinds, bounds), key=lambda kind: (-bounds[kind].rate_per_s / usd_s[kind], kind)
    )
    served = partial(_is_served, objectives=objectives)
    points: list[VidurPoint] = []
    simulated = 0
    for kind in order:
        bound = bounds[kind].rate_per_s
        least = CLOSE * points[0].requests_per_usd * usd_s[kind] if points else LEAST_SHARE * bound
        if not bound > least:
            break
        simulated += 1
        found = yield from _measure(
            kind, bounds[kind], catalogue, short, served, least=least, tolerance=COARSE
        )
        points = in_order([*points, found])
    longer = yield from together(
        [
            _measure(each.kind, bounds[each.kind], catalogue, long, served, low=each.capacity_per_s)
            for each in points[:KEPT]
            if each.requests_per_usd >= CLOSE * points[0].requests_per_usd
        ]
    )
    return VidurBest(tuple(in_order(longer)), kinds=len(kinds), simulated=simulated)


def _measure(
    kind: InstanceKind,
    bound: Bound,
    catalogue: Catalogue,
    sample: Sample,
    served: Served,
    *,
    low: float = 0.0,
    least: float = 0.0,
    tolerance: float = FINE,
) -> Search[VidurPoint | None]:
    """At its capacity; None where it has none, or less than ``least``. A queue that takes long to get long is
    seen in long runs alone."""
    found = yield from find_capacity(
        sample.of((PoolPlan(kind=kind, count=1),), max(bound.sojourn_s, 2 * DELAY_S)),
        served,
        bound.rate_per_s,
        low=low,
        least=least,
        tolerance=tolerance,
    )
    if found.is_cut or found.point is None:
        return None
    latencies = _latencies_of(found.point)
    if latencies is None:
        return None
    return VidurPoint(kind, found.rate_per_s, found.rate_per_s / usd_per_s(kind, catalogue), *latencies)


def _is_served(point: Point, objectives: ServiceObjectives) -> bool:
    latencies = _latencies_of(point)
    return has_short_queue(point) and latencies is not None and _are_kept(latencies, objectives)


def _latencies_of(point: Point) -> Latencies | None:
    """None where nobody got a token."""
    if not point.ttft_s:
        return None
    return (
        point.ttft_s[P90],
        point.tbt_s[TBT_P99] if point.tbt_s else 0.0,
        point.tpot_s[P90] if point.tpot_s else 0.0,
        point.end_to_end_s[P90],
    )


def usd_per_s(kind: InstanceKind, catalogue: Catalogue) -> float:
    return catalogue[kind.device].price_usd_h * kind.devices / SECONDS_PER_HOUR


def in_order(points: Iterable[VidurPoint | None]) -> list[VidurPoint]:
    """Best first."""
    there = (each for each in points if each is not None)
    return sorted(there, key=lambda each: (-each.requests_per_usd, each.kind))


def within(points: Sequence[VidurPoint], objectives: ServiceObjectives) -> list[VidurPoint]:
    """Those that keep TTFT's 90th and the gaps' 99th percentile, as the paper has them, and TPOT's and whole
    requests' 90th."""
    return [
        each
        for each in points
        if _are_kept((each.ttft_p90_s, each.tbt_p99_s, each.tpot_p90_s, each.end_to_end_p90_s), objectives)
    ]


def _are_kept(latencies: Latencies, objectives: ServiceObjectives) -> bool:
    bounds_s = (objectives.ttft_s, objectives.tbt_s, objectives.tpot_s, objectives.end_to_end_s)
    return all(is_within(each, bound_s) for each, bound_s in zip(latencies, bounds_s, strict=True))


def pareto_front(points: Sequence[VidurPoint], latency_s: Callable[[VidurPoint], float]) -> list[VidurPoint]:
    """Those that nobody betters in both, the quickest first."""
    front: list[VidurPoint] = []
    for each in sorted(points, key=lambda point: (latency_s(point), -point.requests_per_usd)):
        if not front or each.requests_per_usd > front[-1].requests_per_usd:
            front.append(each)
    return front
