"""DistServe's placement searches (section 4): how many devices a prefill and a decode instance should have,
and how many instances there should be.

Algorithm 1 is for clusters whose network carries KV with ease: each phase is simulated by itself, and the
configuration with the most goodput per device is replicated to the traffic. Algorithm 2 is for those where
only a node's own links do: a prefill and a decode instance share a node, or their stages with the same layers
do, and are simulated together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from common.devices import Catalogue
from common.messages import Role
from services.planner.bounds import Bound
from services.planner.candidates import Deployment, InstanceKind, PoolPlan
from services.planner.goodput import FINE, Capacity, Served, find_capacity
from services.planner.probes import Phase, Search, Tally, Tell, together, untold
from services.planner.samples import Sample

NODE_DEVICES = 8
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PhasePlacement:
    """``per_device``: goodput, requests a second."""

    kind: InstanceKind
    goodput_per_s: float
    count: int

    @property
    def per_device(self) -> float:
        return self.goodput_per_s / self.kind.devices


@dataclass(frozen=True, slots=True)
class HighAffinityPlacement:
    """``tried``: every configuration of each phase, best first."""

    prefill: PhasePlacement
    decode: PhasePlacement
    tried: tuple[PhasePlacement, ...]

    @property
    def deployment(self) -> Deployment:
        return _replicated(self.prefill, self.decode)

    def least(self, taken: Callable[[Deployment], float]) -> Deployment:
        """Of all that were tried, what serves the rate and takes the least."""
        prefill, decode = ([each for each in self.tried if each.kind.role == role] for role in ROLES)
        return min((_replicated(*pair) for pair in product(prefill, decode)), key=taken)


def _replicated(*placed: PhasePlacement) -> Deployment:
    return Deployment(tuple(PoolPlan(kind=each.kind, count=each.count) for each in placed))


@dataclass(frozen=True, slots=True)
class PairPlacement:
    """A prefill and a decode instance, corresponding stages in one node, ``count`` times."""

    deployment: Deployment
    goodput_per_s: float
    count: int

    @property
    def per_device(self) -> float:
        return self.goodput_per_s / self.deployment.devices

    @property
    def whole(self) -> Deployment:
        """All pairs."""
        pools = self.deployment.pools
        return Deployment(tuple(msgspec.structs.replace(pool, count=self.count) for pool in pools))


def place_with_high_affinity(
    prefill: Sequence[InstanceKind],
    decode: Sequence[InstanceKind],
    bounds: Mapping[InstanceKind, Bound],
    served: Served,
    sample: Sample,
    rate_per_s: float,
    tell: Tell = untold,
) -> Search[HighAffinityPlacement | None]:
    """Algorithm 1. None where a phase keeps its objectives on no kind."""
    kinds = [*prefill, *decode]
    found = yield from together(
        [_goodput(kind, bounds[kind], served, sample) for kind in kinds],
        Tally(tell, "instances measured", len(kinds)),
    )
    placed = [
        PhasePlacement(kind, each.rate_per_s, math.ceil(rate_per_s / each.rate_per_s))
        for kind, each in zip(kinds, found, strict=True)
        if each.rate_per_s > 0
    ]
    placed.sort(key=lambda each: (-each.per_device, each.kind))
    best: dict[str, PhasePlacement] = {}
    for each in placed:
        best.setdefault(each.kind.role, each)
    if len(best) < 2:
        return None
    return HighAffinityPlacement(best["prefill"], best["decode"], tuple(placed))


def _goodput(kind: InstanceKind, bound: Bound, served: Served, sample: Sample) -> Search[Capacity]:
    """simu_prefill and simu_decode."""
    pools = (PoolPlan(kind=kind, count=1),)
    phase: Phase = "prefill" if kind.role == "prefill" else "decode"
    probe_at = sample.of(pools, bound.sojourn_s, phase)
    found = yield from find_capacity(probe_at, served, bound.rate_per_s, tolerance=FINE)
    return found


def place_with_low_affinity(
    prefill: Sequence[InstanceKind],
    decode: Sequence[InstanceKind],
    bounds: Mapping[InstanceKind, Bound],
    served: Served,
    sample: Sample,
    rate_per_s: float,
    catalogue: Catalogue,
    node_devices: int = NODE_DEVICES,
    tell: Tell = untold,
) -> Search[list[PairPlacement]]:
    """Algorithm 2: all whose corresponding stages fit a node together and that serve anything, best first."""
    pairs = [
        (first, second)
        for first, second in product(prefill, decode)
        if first.device == second.device and pair_nodes(first, second, node_devices)
    ]
    deployments = [_by_stages(pair, catalogue, node_devices) for pair in pairs]
    found = yield from together(
        [
            _pair_goodput(pair, deployment, bounds, served, sample)
            for pair, deployment in zip(pairs, deployments, strict=True)
        ],
        Tally(tell, "pairs measured", len(pairs)),
    )
    placed = [
        PairPlacement(deployment, each.rate_per_s, math.ceil(rate_per_s / each.rate_per_s))
        for deployment, each in zip(deployments, found, strict=True)
        if each.rate_per_s > 0
    ]
    return sorted(placed, key=lambda each: (-each.per_device, each.deployment.pools))


def pair_nodes(first: InstanceKind, second: InstanceKind, node_devices: int) -> int | None:
    """The fewest nodes each of which holds the same share of both instances' layers, in whole stages: the
    paper's inter-op degree, and the reference's pp_cross. With more of them pipelines would only cross more
    often."""
    devices = first.devices + second.devices
    for nodes in range(1, min(first.pipeline, second.pipeline) + 1):
        is_even = first.pipeline % nodes == 0 and second.pipeline % nodes == 0
        if is_even and devices <= nodes * node_devices:
            return nodes
    return None


def _by_stages(
    pair: tuple[InstanceKind, InstanceKind], catalogue: Catalogue, node_devices: int
) -> Deployment:
    """KV moves over the nodes' own links, what stages hand on over the network where there are several."""
    nodes = pair_nodes(*pair, node_devices) or 1
    return Deployment(
        tuple(
            PoolPlan(
                kind=msgspec.structs.replace(kind, nodes=nodes),
                count=1,
                link_bytes_per_s=kind.devices * catalogue[kind.device].interchip_gb_s * 1e9,
            )
            for kind in pair
        )
    )


def _pair_goodput(
    pair: tuple[InstanceKind, InstanceKind],
    deployment: Deployment,
    bounds: Mapping[InstanceKind, Bound],
    served: Served,
    sample: Sample,
) -> Search[Capacity]:
    probe_at = sample.of(deployment.pools, max(bounds[kind].sojourn_s for kind in pair))
    high = min(bounds[kind].rate_per_s for kind in pair)
    found = yield from find_capacity(probe_at, served, high, tolerance=FINE)
    return found
