"""What a plan is to reach, and what a deployment is worth by it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from common.devices import Catalogue
from common.errors import ConfigError
from common.latency import ServiceObjectives
from services.planner.budget import Budget
from services.planner.candidates import Deployment, InstanceKind, PoolPlan
from services.planner.goodput import Capacity

Objective = Literal["cost", "power", "throughput"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, slots=True)
class Demand:
    """``rate_per_s`` to be served for the least ``cost`` or (provisioned) ``power``, or the highest rate
    within the ``budget``, which bounds the other two where it has limits. ``catalogue``: at the prices that
    count. ``goal``: the share of requests that meet all objectives."""

    objective: Objective
    rate_per_s: float
    budget: Budget
    catalogue: Catalogue
    objectives: ServiceObjectives
    goal: float

    def __post_init__(self) -> None:
        if not 0 < self.goal < 1:
            raise ConfigError("--attainment", self.goal, "must be a share over 0 and under 1")
        if self.objective == "throughput" and not self.budget.limits:
            rule = "needs --max-gpus, --max-cost or --max-power: more devices always serve more"
            raise ConfigError("--objective", self.objective, rule)

    def unit(self, kind: InstanceKind) -> float:
        """What one instance costs: dollars an hour, watts, or its share of the budget."""
        if self.objective == "cost":
            return sum(self.catalogue[device].price_usd_h * count for device, count in kind.parts)
        if self.objective == "power":
            return power_w(kind, self.catalogue)
        return self.budget.share(kind.parts)

    def cost(self, deployment: Deployment) -> float:
        """What all its instances cost."""
        return sum(self.unit(pool.kind) * pool.count for pool in deployment.pools)

    def allows(self, deployment: Deployment) -> bool:
        return self.budget.allows(deployment.parts)

    def burden(self, kind: InstanceKind, capacity_per_s: float) -> float:
        """The least that instances of the kind cost: the fewest whole ones that serve the rate, or its
        share of the budget per request a second."""
        if not capacity_per_s > 0:
            return math.inf
        if self.objective == "throughput":
            return self.unit(kind) / capacity_per_s
        count = math.ceil(self.rate_per_s / capacity_per_s)
        if not self.budget.allows(kind.parts, count):
            return math.inf
        return self.unit(kind) * count

    def needed_per_s(self, kind: InstanceKind, burden: float) -> float:
        """The capacity under which an instance of the kind costs more than ``burden``."""
        if math.isinf(burden):
            return 0.0
        if self.objective == "throughput":
            return self.unit(kind) / burden
        count = math.floor(burden / self.unit(kind) + 1e-9)
        return math.inf if count < 1 else self.rate_per_s / count


def power_w(kind: InstanceKind, catalogue: Catalogue) -> float:
    """Provisioned. Raises ConfigError where nobody says."""
    total = 0.0
    for device, count in kind.parts:
        watts = catalogue[device].power_w
        if watts is None:
            raise ConfigError("--objective", "power", f"nobody says what {device} draws")
        total += watts * count
    return total


def price_usd_h(deployment: Deployment, catalogue: Catalogue) -> float:
    return sum(count * catalogue[device].price_usd_h for device, count in deployment.parts)


def provisioned_w(deployment: Deployment, catalogue: Catalogue) -> float | None:
    total = 0.0
    for device, count in deployment.parts:
        watts = catalogue[device].power_w
        if watts is None:
            return None
        total += count * watts
    return total


@dataclass(frozen=True, slots=True)
class Measured:
    """A kind and what one instance of it can do."""

    kind: InstanceKind
    capacity: Capacity

    @property
    def rate_per_s(self) -> float:
        return self.capacity.rate_per_s


@dataclass(frozen=True, slots=True)
class Proposed:
    """A deployment, and the rate that its instances' own ones add up to. ``burden``: as ``Demand`` has it;
    for throughput the rate, negative."""

    deployment: Deployment
    rate_per_s: float
    burden: float


def propose_coupled(demand: Demand, each: Measured) -> Proposed | None:
    if not each.rate_per_s > 0:
        return None
    if demand.objective == "throughput":
        count = demand.budget.most_of(each.kind.parts)
    else:
        count = math.ceil(demand.rate_per_s / each.rate_per_s)
    if count < 1:
        return None
    return _proposed(demand, (PoolPlan(kind=each.kind, count=count),), count * each.rate_per_s)


def propose_pair(demand: Demand, prefill: Measured, decode: Measured) -> Proposed | None:
    """DistServe's n and m."""
    if not (prefill.rate_per_s > 0 and decode.rate_per_s > 0):
        return None
    if demand.objective == "throughput":
        counts = _counts_within(demand.budget, prefill, decode)
    else:
        rate = demand.rate_per_s
        counts = math.ceil(rate / prefill.rate_per_s), math.ceil(rate / decode.rate_per_s)
    if not all(counts):
        return None
    pools = tuple(
        PoolPlan(kind=each.kind, count=count) for each, count in zip((prefill, decode), counts, strict=True)
    )
    served = min(counts[0] * prefill.rate_per_s, counts[1] * decode.rate_per_s)
    return _proposed(demand, pools, served)


def _counts_within(budget: Budget, prefill: Measured, decode: Measured) -> tuple[int, int]:
    """That serve the most; (0, 0) where not one of each fits."""
    best, found = 0.0, (0, 0)
    for prefills in range(1, budget.most_of(prefill.kind.parts) + 1):
        beside = [(device, prefills * count) for device, count in prefill.kind.parts]
        decodes = budget.most_of(decode.kind.parts, beside)
        served = min(prefills * prefill.rate_per_s, decodes * decode.rate_per_s)
        if served > best:
            best, found = served, (prefills, decodes)
    return found


def _proposed(demand: Demand, pools: tuple[PoolPlan, ...], served: float) -> Proposed | None:
    deployment = Deployment(pools)
    if not demand.allows(deployment):
        return None
    return Proposed(deployment, served, burden_of(demand, deployment, served))


def burden_of(demand: Demand, deployment: Deployment, served: float) -> float:
    if demand.objective == "throughput":
        return -served
    return demand.cost(deployment)


def first_allowed(demand: Demand, ranked: Iterable[Deployment]) -> Deployment | None:
    return next((each for each in ranked if demand.allows(each)), None)


def none_allowed(demand: Demand, deployments: Iterable[Deployment]) -> str:
    """A line, where there is no ``first_allowed``."""
    budget = demand.budget
    least = min(deployments, key=lambda each: budget.share(each.parts))
    return (
        f"none is{budget.within}: {demand.rate_per_s:g}/s would take {budget.gpus(least.parts)}, {least}, of"
        " instances that are each within it"
    )


def best_first(proposed: Sequence[Proposed]) -> list[Proposed]:
    """Equal ones by what they serve, then by name, so that the order never changes."""
    return sorted(proposed, key=lambda each: (each.burden, -each.rate_per_s, str(each.deployment)))
