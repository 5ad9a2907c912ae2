"""The whole plan as one search: kinds are screened role by role, put together to deployments, and the best of
these simulated whole.

Prefill and decode are measured each by itself (DistServe 4.1): the best pair is the best of each, so that a
thousand pairs take as many measurements as there are kinds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.planner.bounds import Bound
from services.planner.budget import Budget
from services.planner.candidates import InstanceKind, Kinds
from services.planner.demand import (
    Demand,
    Proposed,
    best_first,
    none_allowed,
    propose_coupled,
    propose_pair,
)
from services.planner.finalists import Settled, look_beyond, settle, stretch
from services.planner.probes import Search, Tally, Tell, together, untold
from services.planner.screening import Screened, screen

COUPLED_FINALISTS = 3
PAIR_FINALISTS = 4
ATTENTION_FINALISTS = 2
MOST_RANKED = COUPLED_FINALISTS + PAIR_FINALISTS + ATTENTION_FINALISTS
OVER_FINALISTS = 2
"""Of deployments over the budget, where nothing else was found: those over it by the least."""
LOOKED_BEYOND = 3
"""Of those ranked: what one has to spare takes some six runs over the whole trace."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``ranked``: best first, all of which keep the objectives. ``configurations``: that were searched;
    ``bounded``, ``cut`` and ``measured``: kinds of instances, by what became of them. ``has_attention``: some
    of them have attention workers. ``caveat``: why counts may be too high, and
    ``bursts`` why too low. ``fewest_over``: what keeps the
    objectives and is over the budget by the least, where nothing within it does."""

    demand: Demand
    ranked: tuple[Settled, ...]
    configurations: int
    kinds: int
    bounded: int
    cut: int
    measured: int
    has_attention: bool = False
    caveat: str | None = None
    bursts: str | None = None
    fewest_over: Settled | None = None


class Proposals(NamedTuple):
    """Best first, each."""

    coupled: list[Proposed]
    pairs: list[Proposed]
    apart: list[Proposed]


def plan(
    kinds: Kinds,
    bounds: Mapping[InstanceKind, Bound],
    demand: Demand,
    requests: int,
    caveat: str | None = None,
    bursts: str | None = None,
    tell: Tell = untold,
) -> Search[Plan]:
    """``requests``: of the whole trace."""
    looked_at = Tally(tell, "kinds of instances looked at", sum(map(len, kinds)))
    screened: list[Screened] = yield from together(
        [screen(each, bounds, demand, requests, looked_at) for each in kinds]
    )
    coupled, pairs, apart = _propose(demand, screened)
    finalists = _unlike(coupled)[:COUPLED_FINALISTS] + _unlike(pairs)[:PAIR_FINALISTS]
    finalists += _unlike(apart)[:ATTENTION_FINALISTS]
    ranked = yield from _simulate(demand, finalists, requests, tell)
    over: list[Settled] = []
    if not ranked and demand.budget.limits and demand.objective != "throughput":
        over = yield from _least_over(demand, screened, requests, tell)
        allowed = [each for each in over if demand.allows(each.deployment)]
        ranked = yield from _look_beyond(demand, allowed, requests, tell)
    return Plan(
        demand=demand,
        ranked=tuple(ranked),
        configurations=kinds.configurations,
        kinds=sum(map(len, kinds)),
        bounded=sum(each.bounded for each in screened),
        cut=sum(each.cut for each in screened),
        measured=sum(len(each.measured) for each in screened),
        has_attention=bool(kinds.attention),
        caveat=caveat,
        bursts=bursts,
        fewest_over=None
        if ranked
        else min(over, key=lambda each: demand.budget.share(each.deployment.parts), default=None),
    )


def _propose(demand: Demand, screened: Sequence[Screened]) -> Proposals:
    mixed, prefill, decode, attention = (each.measured for each in screened)
    coupled = best_first([found for each in mixed if (found := propose_coupled(demand, each))])
    pairs, apart = (
        best_first([found for p in prefill for d in some if (found := propose_pair(demand, p, d))])
        for some in (decode, attention)
    )
    return Proposals(coupled, pairs, apart)


def _least_over(
    demand: Demand, screened: Sequence[Screened], requests: int, tell: Tell
) -> Search[list[Settled]]:
    """Those that take the least of the budget, best first: some may turn out to be allowed."""
    unbounded = replace(demand, budget=Budget())
    proposed = [each for some in _propose(unbounded, screened) for each in some]
    proposed.sort(key=lambda each: demand.budget.share(each.deployment.parts))
    least = _unlike(proposed)[:OVER_FINALISTS]
    whole = Tally(tell, "deployments over the budget simulated whole", len(least))
    found = yield from together([settle(unbounded, each, requests) for each in least], whole)
    return in_order([each for each in found if each is not None])


def _unlike(proposed: Sequence[Proposed]) -> list[Proposed]:
    """One of those that differ in how they batch alone, and the next best: whole simulations are dear, and
    finalists are to be alternatives."""
    seen: set[tuple[tuple[str, int], ...]] = set()
    first: list[Proposed] = []
    rest: list[Proposed] = []
    for each in proposed:
        hardware = tuple((pool.kind.hardware, pool.count) for pool in each.deployment.pools)
        (rest if hardware in seen else first).append(each)
        seen.add(hardware)
    return first + rest[:1]


def _simulate(
    demand: Demand, finalists: Sequence[Proposed], requests: int, tell: Tell
) -> Search[list[Settled]]:
    one = stretch if demand.objective == "throughput" else settle
    whole = Tally(tell, "deployments simulated whole", len(finalists))
    settled = yield from together([one(demand, each, requests) for each in finalists], whole)
    ranked = in_order([each for each in settled if each is not None])
    if demand.objective == "throughput":
        return ranked
    ranked = yield from _look_beyond(demand, ranked, requests, tell)
    return ranked


def _look_beyond(
    demand: Demand, ranked: Sequence[Settled], requests: int, tell: Tell
) -> Search[list[Settled]]:
    """The best few with their headroom, and the best with attention workers wherever it ranks."""
    chosen, rest = list(ranked[:LOOKED_BEYOND]), list(ranked[LOOKED_BEYOND:])
    apart = next((each for each in rest if each.deployment.has_attention), None)
    if apart is not None and not any(each.deployment.has_attention for each in chosen):
        chosen.append(apart)
        rest.remove(apart)
    stretched = Tally(tell, "deployments' headroom measured", len(chosen))
    beyond = yield from together([look_beyond(demand, each, requests) for each in chosen], stretched)
    return in_order([*beyond, *rest])


def in_order(settled: Sequence[Settled]) -> list[Settled]:
    """Without twins: two guesses may have settled on one. Equal burdens by what is to spare."""
    found = {each.deployment: each for each in settled}
    return sorted(
        found.values(),
        key=lambda each: (each.burden, -(each.headroom or 0.0), -each.point.attainment, str(each.deployment)),
    )


def verdict(plan: Plan) -> str:
    """Whether disaggregation pays."""
    coupled = next((each for each in plan.ranked if not each.deployment.is_disaggregated), None)
    pair = next((each for each in plan.ranked if each.deployment.is_disaggregated), None)
    if plan.fewest_over is not None:
        return none_allowed(plan.demand, [plan.fewest_over.deployment])
    if coupled is None and pair is None:
        instead = f"loosen them, or allow {'more' if plan.demand.budget.limits else 'other'} devices"
        if plan.caveat:
            instead += ", or give more requests"
        return f"nothing keeps the objectives: {instead}"
    told = _reserve(plan)
    if pair is None or coupled is None:
        left, other = ("disaggregated", "coupled") if coupled is None else ("coupled", "disaggregated")
        said = "disaggregation does not pay here: " if pair is None else "disaggregation is what works here: "
        none = f"no {other} deployment that was simulated keeps the objectives{plan.demand.budget.within}"
        return f"{said}{none}, a {left} one does{told}"
    more, unit, gain = _compared(plan.demand, pair, coupled)
    compared = f"{100 * abs(more):.1f} % {'more' if more > 0 else 'less'} {unit} than the best coupled one"
    if gain <= 0:
        said = "disaggregation does not pay here: the best disaggregated deployment has "
        return said + (compared if more else f"the same {unit} as the best coupled one") + told
    return f"disaggregation pays: the best disaggregated deployment has {compared}{told}"


def attention_verdict(plan: Plan) -> str | None:
    """Whether attention workers pay; None where no such kind was among those looked at, or all that keeps the
    objectives takes too many devices."""
    if not plan.has_attention or plan.fewest_over is not None:
        return None
    apart = next((each for each in plan.ranked if each.deployment.has_attention), None)
    other = next((each for each in plan.ranked if not each.deployment.has_attention), None)
    told = _reserve(plan)
    if apart is None:
        none = "no deployment with them that was simulated keeps the objectives"
        return f"attention workers do not pay here: {none}{plan.demand.budget.within}{told}"
    if other is None:
        none = "nothing without them that was simulated keeps the objectives"
        return f"attention workers are what works here: {none}{plan.demand.budget.within}{told}"
    more, unit, gain = _compared(plan.demand, apart, other)
    compared = f"{100 * abs(more):.1f} % {'more' if more > 0 else 'less'} {unit} than the best one without"
    pays = "pay" if gain > 0 else "do not pay here"
    return f"attention workers {pays}: the best deployment with them has {compared}{told}"


def _reserve(plan: Plan) -> str:
    """The end of a sentence."""
    return ", as far as so few requests tell" if plan.caveat else ""


def _compared(demand: Demand, each: Settled, other: Settled) -> tuple[float, str, float]:
    """By how much of what it has more, as a share, and what is gained by it."""
    if demand.objective == "throughput":
        more = each.rate_per_s / other.rate_per_s - 1
        return more, "rate", more
    more = each.burden / other.burden - 1
    return more, demand.objective, -more
