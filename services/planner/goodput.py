"""The highest rate at which an instance, or a deployment, keeps its objectives: by bisection.

A rate counts as served where the goal's share of requests meets all objectives and nothing piles up
(``Point.left_share``): within few requests a backlog that grows has broken no objective yet, and passes for
service (the published searches' goodput comes from such runs).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.planner.probes import Point, Probe, Search, ask

COARSE = 1.08
FINE = 1.03
"""How far apart the highest rate that is served and the lowest that is not may stay."""
LOWEST = 1 / 64
"""Of the bound: a rate below it is none."""
Served = Callable[[Point], bool]


@dataclass(frozen=True, slots=True)
class Capacity:
    """``rate_per_s``: the highest that was served, 0 for none; ``point``: of it; ``beyond``: of the lowest
    that was not. ``is_cut``: it was given up as it could not reach what it had to."""

    rate_per_s: float
    point: Point | None = None
    beyond: Point | None = None
    is_cut: bool = False


def served_by(goal: float) -> Served:
    return lambda point: point.attainment >= goal and point.left_share <= 0


def find_capacity(
    probe_at: Callable[[float], Probe],
    served: Served,
    high: float,
    *,
    low: float = 0.0,
    least: float = 0.0,
    tolerance: float = COARSE,
    whole_of: float | None = None,
) -> Search[Capacity]:
    """Between ``low``, a guess, and ``high``, a bound that is never reached. Under ``least`` nobody asks how
    much it is. ``whole_of``: a rate that whole instances share: what one serves counts by how many of them
    that takes, and nothing in between is looked for."""
    point: Point | None = None
    beyond: Point | None = None
    best, floor = 0.0, LOWEST if math.isinf(high) else high * LOWEST
    if not high > 0 or high < least:
        return Capacity(0.0, is_cut=True)
    rate = _snapped(first_guess(low, least, high), best, high, whole_of)
    while rate is not None:
        if served(found := (yield from ask(probe_at(rate)))):
            best, point = rate, found
        else:
            high, beyond = rate, found
            if high <= least:
                return Capacity(best, point, beyond, is_cut=True)
        if high <= floor or (best and high / best <= tolerance):
            return Capacity(best, point, beyond)
        rate = _snapped(_next(best, high, low), best, high, whole_of)
    return Capacity(best, point, beyond)


def first_guess(low: float, least: float, high: float) -> float:
    if least:
        return min(least, 0.98 * high)
    return low or (1.0 if math.isinf(high) else 0.7 * high)


def _next(best: float, high: float, low: float) -> float:
    if math.isinf(high):
        return 2 * best
    return math.sqrt(best * high) if best else max(low if low < 0.95 * high else 0.0, high / 2)


def _snapped(rate: float, best: float, high: float, whole_of: float | None) -> float | None:
    """A whole part of the rate between what is known, as near to this as there is; None: there is none."""
    if whole_of is None:
        return rate
    count = max(1, round(whole_of / rate), math.floor(whole_of / high) + 1)
    if best and whole_of / count <= best * (1 + 1e-9):
        count -= 1
    snapped = whole_of / count if count else math.inf
    return snapped if best * (1 + 1e-9) < snapped < high else None
