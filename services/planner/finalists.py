"""Whole deployments over the whole trace: as few instances as keep the objectives, what is to spare, and what
gives way first.

One instance's capacity times their number is a first guess only: many share their queues better than one, and
prefill and decode that each miss a tenth of their objectives miss more together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from services.planner.candidates import Deployment, PoolPlan
from services.planner.demand import Demand, Proposed, burden_of
from services.planner.goodput import Capacity, find_capacity, served_by
from services.planner.probes import Point, PoolPoint, Probe, Search, ask

MOST_GROWN = 6
"""Instances that are added to a guess, at the most."""
MOST_TIMES = 8.0
"""Of the rate that is guessed or asked for: nobody asks how much more than that."""
TOLERANCE = 1.05
FULL_KV = 0.97
FULL_BATCH = 0.9


@dataclass(frozen=True, slots=True)
class Settled:
    """``rate_per_s``: asked for and served, or the highest served. ``headroom``: how much more than that it
    serves, as a share; None where nobody looked, or that is the highest. ``limit``: what gives way first.
    ``is_open``: nothing did up to the highest rate that was tried."""

    deployment: Deployment
    burden: float
    rate_per_s: float
    point: Point
    headroom: float | None
    limit: str
    is_open: bool = False


def settle(demand: Demand, proposed: Proposed, requests: int) -> Search[Settled | None]:
    """At the rate asked for. None where a few instances more do not keep it."""
    served = served_by(demand.goal)

    def at(deployment: Deployment, rate_per_s: float = demand.rate_per_s) -> Probe:
        return Probe(pools=deployment.pools, rate_per_s=rate_per_s, requests=requests)

    deployment = proposed.deployment
    point = yield from ask(at(deployment))
    grown = 0
    missed: Point | None = None
    while not served(point):
        # A full decode pool holds prompts' memory, so that first tokens are late too: each pool in turn.
        number = (_lacking(deployment, point) + grown % 2) % len(deployment.pools)
        larger = _with(deployment, number, 1)
        if grown == MOST_GROWN or not demand.allows(larger):
            return None
        missed, grown, deployment = point, grown + 1, larger
        point = yield from ask(at(deployment))
    deployment, point, beyond = yield from _shrink(demand, deployment, point, at)
    limit = limit_of(deployment, demand, point, beyond or missed)
    return Settled(deployment, burden_of(demand, deployment, 0.0), demand.rate_per_s, point, None, limit)


def _shrink(
    demand: Demand, deployment: Deployment, point: Point, at: Callable[[Deployment], Probe]
) -> Search[tuple[Deployment, Point, Point | None]]:
    """Without any instance that is not needed, the dearest first."""
    served = served_by(demand.goal)
    beyond: Point | None = None
    numbers = sorted(
        range(len(deployment.pools)), key=lambda number: -demand.unit(deployment.pools[number].kind)
    )
    for number in numbers:
        while deployment.pools[number].count > 1:
            smaller = _with(deployment, number, -1)
            found = yield from ask(at(smaller))
            if not served(found):
                beyond = found
                break
            deployment, point = smaller, found
    return deployment, point, beyond


def look_beyond(demand: Demand, settled: Settled, requests: int) -> Search[Settled]:
    """With its headroom, and what ends it."""
    deployment, rate = settled.deployment, settled.rate_per_s
    found = yield from _highest_rate(demand, deployment, rate, requests)
    headroom = max(0.0, found.rate_per_s / rate - 1)
    if found.beyond is None and found.point is not None:
        limit = f"nothing up to {found.rate_per_s:.3g}/s, the highest rate that was tried"
        return replace(settled, headroom=headroom, limit=limit, is_open=True)
    limit = limit_of(deployment, demand, found.point or settled.point, found.beyond)
    return replace(settled, headroom=headroom, limit=limit)


def stretch(demand: Demand, proposed: Proposed, requests: int) -> Search[Settled | None]:
    """To the highest rate that it serves."""
    deployment = proposed.deployment
    found = yield from _highest_rate(demand, deployment, proposed.rate_per_s, requests)
    if found.point is None:
        return None
    rate = found.rate_per_s
    limit = limit_of(deployment, demand, found.point, found.beyond)
    return Settled(deployment, burden_of(demand, deployment, rate), rate, found.point, None, limit)


def _highest_rate(demand: Demand, deployment: Deployment, guess: float, requests: int) -> Search[Capacity]:
    def probe_at(rate_per_s: float) -> Probe:
        return Probe(pools=deployment.pools, rate_per_s=rate_per_s, requests=requests)

    return find_capacity(probe_at, served_by(demand.goal), MOST_TIMES * guess, low=guess, tolerance=TOLERANCE)


def _with(deployment: Deployment, number: int, more: int) -> Deployment:
    pools = list(deployment.pools)
    pools[number] = msgspec.structs.replace(pools[number], count=pools[number].count + more)
    return Deployment(tuple(pools))


def _lacking(deployment: Deployment, point: Point) -> int:
    """The pool whose objective is missed by more."""
    if len(deployment.pools) == 1:
        return 0
    wanted = "prefill" if point.ttft_share <= point.tpot_share else "decode"
    return next(number for number, pool in enumerate(deployment.pools) if pool.kind.role == wanted)


def limit_of(deployment: Deployment, demand: Demand, served: Point, beyond: Point | None) -> str:
    """Half a sentence: which objective is missed first by what is not served any more, and what of its pool
    is short in what just is; of the busiest pool where none is missed."""
    point = beyond or served
    missed = {
        "first tokens": point.ttft_share,
        "time per token": point.tpot_share,
        "other objectives": point.other_share,
    }
    what, number = min(missed, key=lambda name: missed[name]), _lacking(deployment, point)
    if point.attainment >= demand.goal:
        what = "work that piles up" if point.left_share > 0 else "whole instances"
        number = max(range(len(served.pools)), key=lambda each: _busy(served.pools[each]))
    return f"{what}: {_short_of(deployment.pools[number], served.pools[number])}"


def _busy(found: PoolPoint) -> float:
    return max(found.busy, found.attention_busy)


def _short_of(pool: PoolPlan, found: PoolPoint) -> str:
    role = pool.kind.role
    if found.kv_peak >= FULL_KV and role != "prefill":
        whose = "attention workers'" if pool.kind.attention_workers else f"{role} instances'"
        return f"{whose} KV memory is full"
    if role != "prefill" and found.batch >= FULL_BATCH * pool.kind.max_decode_batch / pool.kind.turns:
        return f"{role} instances' batches of {pool.kind.max_decode_batch} are full"
    if found.attention_busy > found.busy:
        return f"attention workers compute {100 * found.attention_busy:.0f} % of the time"
    return f"{role} instances compute {100 * found.busy:.0f} % of the time"
