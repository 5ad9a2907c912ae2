"""Splitwise's provisioning (section IV-D): how many prompt and token machines of which kind.

A count of each is enough where all nine bounds of Table VI hold: the 50th, 90th and 99th percentile of how
many times as long first tokens, gaps and whole requests take as on a DGX-A100 that has nothing else to do.
Machines are whole: eight devices. A design is a kind of prompt machine and one of token machine; one kind for
both is a baseline."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from common.errors import ConfigError
from services.planner.bounds import Bound
from services.planner.budget import Budget
from services.planner.candidates import Deployment, InstanceKind, Kinds, PoolPlan
from services.planner.goodput import FINE, find_capacity
from services.planner.probes import Point, Probe, Search, Tally, Tell, ask, together, untold

SLOWDOWNS = {"TTFT": (2.0, 3.0, 6.0), "TBT": (1.25, 1.5, 5.0), "E2E": (1.25, 1.5, 5.0)}
"""P50, P90, P99, over a request alone on a DGX-A100 (Table VI)."""
TABLE_VI = tuple(bound for bounds in SLOWDOWNS.values() for bound in bounds)
"""In the order of ``Point.slowdowns``."""
NAMES = tuple(f"{what} P{rank}" for what in SLOWDOWNS for rank in (50, 90, 99))
MACHINE_DEVICES = 8
LETTERS = {"a100": "A", "a100-sxm": "A", "h100": "H", "h100-sxm": "H", "h100-sxm-capped": "Hcap"}
DESIGNS = "designs provisioned"
MOST_MACHINES = 4
"""Times as many of either as its bound says: no more help."""


@dataclass(frozen=True, slots=True)
class Design:
    """``name``: as in Table V, AA, HH, HA, HHcap, or by its devices."""

    name: str
    prompt: InstanceKind
    token: InstanceKind | None

    def deployment(self, prompts: int, tokens: int) -> Deployment:
        pools = [PoolPlan(kind=self.prompt, count=prompts)]
        if self.token is not None:
            pools.append(PoolPlan(kind=self.token, count=tokens))
        return Deployment(tuple(pools))


@dataclass(frozen=True, slots=True)
class Provisioned:
    """``rate_per_s``: that it serves."""

    design: Design
    deployment: Deployment
    rate_per_s: float
    point: Point


def designs_of(kinds: Kinds, within: str = "") -> list[Design]:
    """Every pair of devices, and each by itself for both phases; the most generous batching of the space.
    Raises ConfigError where no machine of eight holds the model ``within`` what the kinds are."""

    def widest(some: Sequence[InstanceKind], device: str) -> InstanceKind | None:
        whole = [kind for kind in some if kind.device == device and kind.devices == MACHINE_DEVICES]
        return max(whole, key=lambda kind: (kind.chunk_tokens, kind.max_decode_batch, kind), default=None)

    found: list[Design] = []
    names = list(dict.fromkeys(kind.device for kind in kinds.mixed))
    for name in names:
        mixed = widest(kinds.mixed, name)
        if mixed is not None:
            found.append(Design(f"baseline {name}", mixed, None))
    for first, second in product(names, names):
        prompt, token = widest(kinds.prefill, first), widest(kinds.decode, second)
        if prompt is not None and token is not None:
            letters = LETTERS.get(first, first), LETTERS.get(second, second)
            is_known = first in LETTERS and second in LETTERS
            found.append(Design("".join(letters) if is_known else "+".join(letters), prompt, token))
    if not found:
        rule = f"splitwise's machines are of {MACHINE_DEVICES} devices: none of that size is in the space"
        raise ConfigError("--search", "splitwise", rule + within)
    return found


Cost = Callable[[Deployment], float]


def has_met_nine(point: Point) -> bool:
    return bool(point.slowdowns) and point.done_share == 1.0 and point.left_share <= 0 and not missed(point)


def missed(point: Point) -> tuple[str, ...]:
    return tuple(
        name
        for name, value, bound in zip(NAMES, point.slowdowns, TABLE_VI, strict=True)
        if not value <= bound
    )


def cheapest(
    designs: Sequence[Design],
    bounds: Mapping[InstanceKind, Bound],
    cost: Cost,
    rate_per_s: float,
    requests: int,
    budget: Budget,
    tell: Tell = untold,
) -> Search[list[Provisioned]]:
    """The least cost of each design that serves the rate within the budget; cheapest first."""
    found = yield from together(
        [_cheapest(each, bounds, cost, rate_per_s, requests, budget) for each in designs],
        Tally(tell, DESIGNS, len(designs)),
    )
    return sorted(
        (each for each in found if each is not None),
        key=lambda each: (cost(each.deployment), each.design.name),
    )


def fewest_by_bounds(
    design: Design, bounds: Mapping[InstanceKind, Bound], rate_per_s: float
) -> Deployment | None:
    """With fewer machines of either the rate cannot be served; None: with none."""
    prompts = _least(bounds[design.prompt], rate_per_s)
    tokens = 0 if design.token is None else _least(bounds[design.token], rate_per_s)
    return None if prompts is None or tokens is None else design.deployment(prompts, tokens)


def _cheapest(
    design: Design,
    bounds: Mapping[InstanceKind, Bound],
    cost: Cost,
    rate_per_s: float,
    requests: int,
    budget: Budget,
) -> Search[Provisioned | None]:
    """Along the border of what serves: with one prompt machine more as many token machines do, or fewer."""
    fewest = fewest_by_bounds(design, bounds, rate_per_s)
    if fewest is None:
        return None
    least_prompts = fewest.pools[0].count
    least_tokens = 0 if design.token is None else fewest.pools[1].count
    best: Provisioned | None = None
    tokens = MOST_MACHINES * least_tokens
    for prompts in range(least_prompts, MOST_MACHINES * least_prompts + 1):
        least = design.deployment(prompts, least_tokens)
        if not budget.allows(least.parts) or (best is not None and cost(least) >= cost(best.deployment)):
            break
        while not budget.allows(design.deployment(prompts, tokens).parts):
            tokens -= 1
        served = yield from _fewest_tokens(design, prompts, least_tokens, tokens, rate_per_s, requests)
        if served is None:
            continue
        tokens, point = served
        deployment = design.deployment(prompts, tokens)
        if best is None or cost(deployment) < cost(best.deployment):
            best = Provisioned(design, deployment, rate_per_s, point)
    return best


def _least(bound: Bound, rate_per_s: float) -> int | None:
    return max(1, math.ceil(rate_per_s / bound.rate_per_s)) if bound.rate_per_s > 0 else None


def _fewest_tokens(
    design: Design, prompts: int, least: int, most: int, rate_per_s: float, requests: int
) -> Search[tuple[int, Point] | None]:
    """By bisection between what the bound allows and what served with one prompt machine less."""

    def at(tokens: int) -> Probe:
        pools = design.deployment(prompts, tokens).pools
        return Probe(pools=pools, rate_per_s=rate_per_s, requests=requests)

    point = yield from ask(at(most))
    if not has_met_nine(point):
        return None
    low, high = least - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        found = yield from ask(at(middle))
        if has_met_nine(found):
            high, point = middle, found
        else:
            low = middle
    return high, point


def most_throughput(
    designs: Sequence[Design],
    bounds: Mapping[InstanceKind, Bound],
    budget: Budget,
    requests: int,
    tell: Tell = untold,
) -> Search[list[Provisioned]]:
    """The split of each design that serves the most within the budget; the best first."""
    found = yield from together(
        [_most_throughput(each, bounds, budget, requests) for each in designs],
        Tally(tell, DESIGNS, len(designs)),
    )
    return sorted(
        (each for each in found if each is not None), key=lambda each: (-each.rate_per_s, each.design.name)
    )


def _most_throughput(
    design: Design, bounds: Mapping[InstanceKind, Bound], budget: Budget, requests: int
) -> Search[Provisioned | None]:
    """Splits by their bounds, as long as these are over what was found."""
    splits = sorted(_splits(design, bounds, budget), key=lambda each: -each[0])
    best: Provisioned | None = None
    for high, deployment in splits:
        if best is not None and high <= best.rate_per_s:
            break
        least = best.rate_per_s if best is not None else 0.0

        def probe_at(rate_per_s: float, pools: tuple[PoolPlan, ...] = deployment.pools) -> Probe:
            return Probe(pools=pools, rate_per_s=rate_per_s, requests=requests)

        found = yield from find_capacity(probe_at, has_met_nine, high, least=least, tolerance=FINE)
        if found.point is not None and (best is None or found.rate_per_s > best.rate_per_s):
            best = Provisioned(design, deployment, found.rate_per_s, found.point)
    return best


def _splits(
    design: Design, bounds: Mapping[InstanceKind, Bound], budget: Budget
) -> Iterator[tuple[float, Deployment]]:
    """(the most that it could serve, as many machines as the budget has)."""
    for prompts in range(1, budget.most_of(design.prompt.parts) + 1):
        high, tokens = prompts * bounds[design.prompt].rate_per_s, 0
        if design.token is not None:
            tokens = budget.most_of(design.token.parts, design.deployment(prompts, 0).parts)
            high = min(high, tokens * bounds[design.token].rate_per_s)
        if high > 0:
            yield high, design.deployment(prompts, tokens)
