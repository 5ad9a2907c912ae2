"""Simulated runs as rows need them: requests at a rate, the most that is served, the fewest that serve."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from common.latency import ServiceObjectives
from services.bench.arrivals import poisson_arrivals
from services.bench.lengths import LengthPair
from services.simulator.cluster import Cluster
from services.simulator.config import simulated_from_tree
from services.simulator.metrics import Metrics, measure
from services.simulator.run import Load, Offered, simulate

SEED = 0
Tree = Mapping[str, Any]
NOBODY_IS_TURNED_AWAY = {
    "max_pending_prefill_tokens": 1_000_000_000,
    "max_prefill_wait_s": 86_400.0,
    "max_requests_per_decode": 1_000_000,
    "rebalance_decodes": False,
    "shadow_share": 0.0,
}
"""A mesh's scheduler, where a paper's refuses nothing."""


def poisson(lengths: Sequence[LengthPair], rate_per_s: float, seed: int = SEED) -> list[Offered]:
    """The same gaps at every rate, but for their scale."""
    times = islice(poisson_arrivals(1.0, seed), len(lengths))
    return [
        Offered(time_s / rate_per_s, each.prompt_tokens, each.output_tokens)
        for time_s, each in zip(times, lengths, strict=True)
    ]


def at_once(lengths: Sequence[LengthPair]) -> list[Offered]:
    return [Offered(0.0, each.prompt_tokens, each.output_tokens) for each in lengths]


def run_cluster(tree: Tree, requests: Sequence[Offered]) -> Cluster:
    return simulate(simulated_from_tree(tree), Load(requests))


def run_metrics(
    tree: Tree, requests: Sequence[Offered], objectives: ServiceObjectives | None = None
) -> Metrics:
    return measure(run_cluster(tree, requests), objectives)


def scaled(count: int, size: float, least: int = 20) -> int:
    """So many requests, or a share of them."""
    return max(least, round(count * size))


def largest_rate(is_served: Callable[[float], bool], low: float, high: float, share: float) -> float:
    """The largest rate that is served, by halving on a logarithmic scale, to ``share`` of it; 0 where ``low``
    is not. ``high`` counts as not served."""
    if not is_served(low):
        return 0.0
    while high > (1 + share) * low:
        middle = math.sqrt(low * high)
        if is_served(middle):
            low = middle
        else:
            high = middle
    return low


def fewest(is_enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The fewest between both that are enough, by halving; None where ``high`` is not."""
    if not is_enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high
