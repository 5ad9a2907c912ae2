"""Vidur-Search (sections 6 and 7.3): queries per second and dollar of every configuration of an instance.

The capacity of one is the highest rate whose requests wait at most ``DELAY_S`` for their first chunk, at the
99th percentile; what first tokens and gaps take is measured there. Objectives filter afterwards, so that the
picture shows what a little more patience would save."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.cost import SECONDS_PER_HOUR
from common.devices import Catalogue
from common.latency import REPORTED_PERCENTILES, ServiceObjectives, is_within
from services.planner.bounds import Bound
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.goodput import FINE, find_capacity
from services.planner.probes import Point, Search, together
from services.planner.samples import Sample

DELAY_S = 5.0
P90 = 1
"""Of a point's (50, 90, 99)."""
TBT_P99 = REPORTED_PERCENTILES.index(99.0)
MOST_LOST = 0.01
"""Requests that are refused wait for ever: no more than the percentile leaves out."""


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


def has_short_queue(point: Point) -> bool:
    if point.queue_p99_s is None:
        return False
    return point.queue_p99_s <= DELAY_S and point.done_share >= 1 - MOST_LOST


def search_capacities(
    kinds: Sequence[InstanceKind],
    bounds: Mapping[InstanceKind, Bound],
    catalogue: Catalogue,
    sample: Sample,
) -> Search[list[VidurPoint]]:
    """Best first."""
    found = yield from together(
        [
            find_capacity(
                sample.of((PoolPlan(kind=kind, count=1),), bounds[kind].sojourn_s),
                has_short_queue,
                bounds[kind].rate_per_s,
                tolerance=FINE,
            )
            for kind in kinds
        ]
    )
    points = []
    for kind, each in zip(kinds, found, strict=True):
        if each.point is None or not each.point.ttft_s:
            continue
        usd_s = catalogue[kind.device].price_usd_h * kind.devices / SECONDS_PER_HOUR
        points.append(
            VidurPoint(
                kind,
                each.rate_per_s,
                each.rate_per_s / usd_s,
                each.point.ttft_s[P90],
                each.point.tbt_s[TBT_P99] if each.point.tbt_s else 0.0,
                each.point.tpot_s[P90] if each.point.tpot_s else 0.0,
                each.point.end_to_end_s[P90],
            )
        )
    return sorted(points, key=lambda each: (-each.requests_per_usd, each.kind))


def within(points: Sequence[VidurPoint], objectives: ServiceObjectives) -> list[VidurPoint]:
    """Those that keep TTFT's 90th and the gaps' 99th percentile, as the paper has them, and TPOT's and whole
    requests' 90th."""
    return [
        each
        for each in points
        if is_within(each.ttft_p90_s, objectives.ttft_s)
        and is_within(each.tbt_p99_s, objectives.tbt_s)
        and is_within(each.tpot_p90_s, objectives.tpot_s)
        and is_within(each.end_to_end_p90_s, objectives.end_to_end_s)
    ]


def pareto_front(points: Sequence[VidurPoint], latency_s: Callable[[VidurPoint], float]) -> list[VidurPoint]:
    """Those that nobody betters in both, the quickest first."""
    front: list[VidurPoint] = []
    for each in sorted(points, key=lambda point: (latency_s(point), -point.requests_per_usd)):
        if not front or each.requests_per_usd > front[-1].requests_per_usd:
            front.append(each)
    return front
