"""Small meshes and loads to simulate."""

from typing import Any

import pytest

from services.simulator.cluster import Cluster
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.run import Load, Offered, simulate

SHAPE = {
    "name": "small",
    "layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1_000,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "parameters": 1_000_000,
    "lookup_parameters": 0,
}
TOKEN_BYTES = 2 * 4 * 2 * 16 * 2
"""Of KV: keys and values of two heads of 16 in four layers, two bytes each."""
PERFORMANCE = {
    "kind": "linear",
    "prefill_s": 0.01,
    "per_prompt_token_s": 1e-4,
    "step_s": 0.02,
    "per_sequence_s": 1e-4,
    "per_context_token_s": 1e-6,
}


def pool(role: str, count: int = 1, **keys: Any) -> dict[str, Any]:
    given = {"name": role, "role": role, "count": count, "kv_tokens": 100_000, "performance": PERFORMANCE}
    return given | keys


def mesh(*pools: dict[str, Any], **sections: Any) -> Simulated:
    """With blocks of 16 tokens, messages that take no time, and fast links, unless told otherwise."""
    tree = {key: value for key, value in sections.items() if key not in ("cluster", "instance")}
    cluster = {"shape": SHAPE, "hop_s": 0.0, "link_bytes_per_s": 1e12} | sections.get("cluster", {})
    instance = {"block_size": 16} | sections.get("instance", {})
    return simulated_from_tree({**tree, "cluster": cluster, "instance": instance, "pool": list(pools)})


def offered(*requests: tuple[float, int, int]) -> list[Offered]:
    return [Offered(*each) for each in requests]


def run(simulated: Simulated, *requests: tuple[float, int, int], **keys: Any) -> Cluster:
    return simulate(simulated, Load(offered(*requests), **keys))


def assert_same_times(one: Cluster, other: Cluster) -> None:
    """Of every request."""
    for column in ("first_token_s", "second_token_s", "end_s", "slowest_gap_s"):
        ones, others = getattr(one.records, column), getattr(other.records, column)
        assert list(ones) == pytest.approx(list(others), abs=1e-6, nan_ok=True), column
