"""A world whose instances' capacities are known: what a search finds there can be found by looking at all."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from common.devices import DEVICES
from common.latency import ServiceObjectives
from common.messages import Role
from services.planner.bounds import Bound
from services.planner.budget import budget_of
from services.planner.candidates import Deployment, InstanceKind, Kinds, PoolPlan
from services.planner.checkpoint import Checkpoint
from services.planner.demand import Demand, Objective
from services.planner.driver import Found, Here, drive
from services.planner.probes import Point, PoolPoint, Probe, Search

CATALOGUE = {
    name: replace(DEVICES[name], price_usd_h=price)
    for name, price in (("a100", 1.0), ("h100", 2.5), ("h20", 0.5))
}
Capacities = Mapping[InstanceKind, float]


def kind_of(role: Role, device: str = "a100", tensor: int = 1, batch: int = 64) -> InstanceKind:
    return InstanceKind(role=role, device=device, tensor=tensor, max_decode_batch=batch)


def attention_kind(tensor: int = 1, workers: int = 2, device: str = "h20") -> InstanceKind:
    """A decode instance whose KV lies on attention workers."""
    return InstanceKind(
        role="decode",
        device="a100",
        tensor=tensor,
        max_decode_batch=64,
        attention_workers=workers,
        attention_device=device,
        staggered_batches=2,
    )


def demand_of(
    objective: Objective = "cost",
    rate: float = 10.0,
    most: int | None = None,
    usd_h: float | None = None,
    power_w: float | None = None,
) -> Demand:
    return Demand(
        objective=objective,
        rate_per_s=rate,
        budget=budget_of(list(CATALOGUE.values()), most, usd_h, power_w),
        catalogue=CATALOGUE,
        objectives=ServiceObjectives(ttft_s=1.0, tpot_s=0.1),
        goal=0.9,
    )


def point(attainment: float = 1.0, left_share: float = -0.1, **keys: float) -> Point:
    return Point(
        attainment=attainment,
        ttft_share=keys.get("ttft_share", attainment),
        tpot_share=keys.get("tpot_share", attainment),
        other_share=1.0,
        done_share=1.0,
        ttft_s=(0.1, 0.2, 0.3),
        tpot_s=(0.01, 0.02, 0.03),
        end_to_end_s=(1.0, 2.0, 3.0),
        tbt_s=(0.01, 0.02, 0.02, 0.03),
        queue_p99_s=0.1,
        slowdowns=(),
        left_share=left_share,
        mean_w=None,
        pools=(PoolPoint(0.5, 8.0, 0.3, 0),) * 2,
    )


def answer(probe: Probe, capacities: Capacities) -> Point:
    """Everybody is served in time up to the capacity of the weaker pool, and nobody over it."""
    served = {pool.kind.role: pool.count * capacities[pool.kind] for pool in probe.pools}
    kept = {role: probe.rate_per_s <= each for role, each in served.items()}
    ttft, tpot = (float(all(kept[each] for each in kept if each != other)) for other in ("decode", "prefill"))
    return point(min(ttft, tpot), ttft_share=ttft, tpot_share=tpot)


def search_world(search: Search[Found], capacities: Capacities) -> tuple[Found, int]:
    """What it found, and how many runs it took."""
    runs = 0

    def run(probe: Probe) -> Point:
        nonlocal runs
        runs += 1
        return answer(probe, capacities)

    with Checkpoint(None) as kept:
        found = drive(search, Here(run), kept, b"")
    return found, runs


def search_with(search: Search[Found], answer_of: Callable[[Probe], Point]) -> Found:
    """In a world that answers so."""
    with Checkpoint(None) as kept:
        return drive(search, Here(answer_of), kept, b"")


def staged(role: Role, tensor: int, pipeline: int, nodes: int = 1) -> InstanceKind:
    return InstanceKind(role=role, device="a100", tensor=tensor, pipeline=pipeline, nodes=nodes)


def kinds_in(capacities: Capacities) -> Kinds:
    roles = {
        role: tuple(kind for kind in capacities if kind.role == role and not kind.attention_workers)
        for role in ("mixed", "prefill", "decode")
    }
    return Kinds(**roles, attention=tuple(kind for kind in capacities if kind.attention_workers))


def bounds_in(capacities: Capacities, slack: float = 1.3) -> dict[InstanceKind, Bound]:
    return {kind: Bound(slack * each, 1.0) for kind, each in capacities.items()}


def least_burden(capacities: Capacities, demand: Demand, most_count: int = 16) -> float:
    """By looking at all deployments of one kind, or of one for each phase."""
    kinds = kinds_in(capacities)
    singles = [(kind,) for kind in kinds.mixed]
    pairs = list(product(kinds.prefill, (*kinds.decode, *kinds.attention)))
    found = float("inf")
    for each in (*singles, *pairs):
        for counts in product(range(1, most_count + 1), repeat=len(each)):
            pools = tuple(PoolPlan(kind=kind, count=count) for kind, count in zip(each, counts, strict=True))
            served = min(count * capacities[kind] for kind, count in zip(each, counts, strict=True))
            if not demand.allows(Deployment(pools)):
                continue
            if demand.objective == "throughput":
                found = min(found, -served)
            elif served >= demand.rate_per_s:
                found = min(found, sum(demand.unit(pool.kind) * pool.count for pool in pools))
    return found
