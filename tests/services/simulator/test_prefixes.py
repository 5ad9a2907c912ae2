"""What simulated prefill instances need not compute, where a trace says that prompts begin alike."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.ids import InstanceId
from services.bench.traces import PREFIX_BLOCK_TOKENS, read_trace
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.metrics import measure
from services.simulator.prefixes import PrefixCache
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import TOKEN_BYTES, mesh, pool

BLOCK = PREFIX_BLOCK_TOKENS
TOKEN_S, PASS_S = 1e-4, 0.01
"""As ``meshes.PERFORMANCE`` has them."""


def alike(prefills: int = 1, **prefix: Any) -> Simulated:
    pools = (pool("prefill", prefills), pool("decode"))
    return mesh(*pools, prefix=prefix, instance={"chunk_tokens": BLOCK})


def one_by_one(simulated: Simulated, *prompts: tuple[int, tuple[int, ...]]) -> tuple[Cluster, list[float]]:
    """Each when the one before it is over; and their times to the first token."""
    requests = [Offered(20.0 * number, tokens, 3, blocks) for number, (tokens, blocks) in enumerate(prompts)]
    cluster = simulate(simulated, Load(requests))
    records = cluster.records
    pairs = zip(records.first_token_s, records.arrival_s, strict=True)
    return cluster, [first_s - arrival_s for first_s, arrival_s in pairs]


def test_what_a_prompt_has_in_common_with_an_earlier_one_takes_no_time() -> None:
    cluster, ttfts = one_by_one(
        alike(), (4 * BLOCK, (1, 2, 3, 4)), (3 * BLOCK + 100, (1, 2, 5, 6)), (2 * BLOCK, (7, 2))
    )
    assert ttfts == pytest.approx(
        [
            4 * (PASS_S + BLOCK * TOKEN_S),
            2 * PASS_S + (BLOCK + 100) * TOKEN_S,
            2 * (PASS_S + BLOCK * TOKEN_S),
        ]
    )
    prefill = measure(cluster).pools[0]
    assert (prefill.hit_tokens, prefill.chunk_tokens) == (2 * BLOCK, (4 + 1 + 2) * BLOCK + 100)
    sent = cluster.network.adapters[InstanceId("prefill-0")].outward
    assert sent.carried_bytes == (9 * BLOCK + 100) * TOKEN_BYTES


def test_the_last_token_of_a_prompt_that_is_kept_is_computed() -> None:
    _, ttfts = one_by_one(alike(), (2 * BLOCK, (1, 2)), (2 * BLOCK, (1, 2)))
    assert ttfts[1] == pytest.approx(PASS_S + TOKEN_S)


def test_without_ids_or_without_the_table_everything_is_computed() -> None:
    same = ((3 * BLOCK, (1, 2, 3)), (3 * BLOCK, (1, 2, 3)))
    pools = (pool("prefill"), pool("decode"))
    _, computed = one_by_one(mesh(*pools, instance={"chunk_tokens": BLOCK}), *same)
    _, unnamed = one_by_one(alike(), (3 * BLOCK, ()), (3 * BLOCK, ()))
    assert computed == unnamed == pytest.approx([3 * (PASS_S + BLOCK * TOKEN_S)] * 2)


def test_what_is_kept_elsewhere_is_brought_here_first() -> None:
    kept = ((3 * BLOCK, (1, 2, 3)), (3 * BLOCK, (1, 2, 4)))
    _, [_, there_s] = one_by_one(alike(), *kept)
    _, [_, brought_s] = one_by_one(alike(bytes_per_s=1e6), *kept)
    assert brought_s - there_s == pytest.approx(2 * BLOCK * TOKEN_BYTES / 1e6)


@pytest.mark.parametrize(("scope", "hits"), [("instance", 0), ("mesh", 1)])
def test_another_instance_knows_of_it_where_the_mesh_keeps_it(scope: str, hits: int) -> None:
    """The second comes while the first instance computes something else."""
    busy = Offered(10.0, 20 * BLOCK, 3)
    requests = [Offered(0.0, 2 * BLOCK, 3, (1, 2)), busy, Offered(10.1, 2 * BLOCK, 3, (1, 3))]
    cluster = simulate(alike(2, scope=scope), Load(requests))
    first, second, third = cluster.records.prefill
    assert first == second != third
    assert measure(cluster).pools[0].hit_tokens == hits * BLOCK


def test_the_least_recently_used_go_and_of_a_prompt_its_end() -> None:
    cache = PrefixCache(4)
    cache.keep((1, 2, 3))
    cache.keep((7, 8))
    assert len(cache) == 4
    assert cache.match((1, 2, 3)) == 2
    cache.keep((9,))
    assert cache.match((7, 8)) == 1
    assert cache.match((1, 2)) == 2
    _, ttfts = one_by_one(
        alike(capacity_tokens=2 * BLOCK), (2 * BLOCK, (1, 2)), (2 * BLOCK, (3, 4)), (2 * BLOCK, (1, 2))
    )
    assert ttfts[2] == pytest.approx(ttfts[0])


def test_an_instance_that_begins_anew_has_nothing() -> None:
    death = {"kind": "death", "instance": "prefill-0", "at_s": 10.0, "lasts_s": 1.0}
    simulated = mesh(
        pool("prefill"), pool("decode"), prefix={}, fault=[death], instance={"chunk_tokens": BLOCK}
    )
    _, ttfts = one_by_one(simulated, (2 * BLOCK, (1, 2)), (2 * BLOCK, (1, 2)))
    assert ttfts[1] == pytest.approx(ttfts[0])


def test_a_real_trace_hits_what_its_ids_say(shared_directory: Path) -> None:
    """Where a mesh keeps everything and each prompt is over before the next comes."""
    trace = read_trace(shared_directory / "data/mooncake/conversation_trace.jsonl.gz", 150)
    requests = [
        Offered(1000.0 * number, each.prompt_tokens, 2, each.block_hashes)
        for number, each in enumerate(trace.requests)
    ]
    seen: set[int] = set()
    expected = 0
    for each in trace.requests:
        whole = each.block_hashes[: each.prompt_tokens // BLOCK]
        count = next((place for place, block in enumerate(whole) if block not in seen), len(whole))
        expected += min(count * BLOCK, each.prompt_tokens - 1)
        seen.update(whole)
    pools = (pool("prefill", 2, kv_tokens=200_000), pool("decode", kv_tokens=200_000))
    simulated = mesh(*pools, prefix={"scope": "mesh"}, instance={"chunk_tokens": 8192, "block_size": 256})
    metrics = measure(simulate(simulated, Load(requests)))
    assert metrics.done == 150
    assert metrics.pools[0].hit_tokens == expected > 0
    assert metrics.pools[0].chunk_tokens == sum(each.prompt_tokens for each in trace.requests) - expected


def test_prefixes_of_a_crowd_lose_nothing() -> None:
    """Cancelled, preempted and begun anew; ``simulate`` holds it to what must be conserved."""
    deaths = {"kind": "death", "pool": "decode", "mean_between_s": 3.0, "lasts_s": 1.0}
    requests = [
        Offered(0.03 * number, 700 + number, 60, (number % 3, 10 + number % 5)) for number in range(120)
    ]
    given: dict[str, Any] = {
        "fault": [deaths],
        "instance": {"chunk_tokens": 300},
        "cluster": {"hop_s": 0.002},
    }
    pools = (pool("prefill", 2, kv_tokens=6000), pool("decode", 2, kv_tokens=6000), pool("mixed"))
    simulated = mesh(*pools, prefix={"capacity_tokens": 4 * BLOCK, "bytes_per_s": 1e7}, **given)
    first, again = (simulate(simulated, Load(requests, retries=20), seed=4) for _ in range(2))
    assert first.records.digest() == again.records.digest()
    assert sum(each.hit_tokens for each in measure(first).pools) > 0


@pytest.mark.parametrize(
    ("prefix", "key", "rule"),
    [
        ({"scope": "town"}, "prefix.scope", "must be one of"),
        ({"capacity_tokens": 100}, "prefix.capacity_tokens", "at least a block"),
        ({"bytes_per_s": 0.0}, "prefix.bytes_per_s", "over 0"),
    ],
)
def test_a_table_that_makes_no_sense_is_an_error(prefix: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        alike(**prefix)
    assert caught.value.key == key


def test_a_pipeline_has_chunks_that_are_kept_in_their_turn() -> None:
    """Of two stages: what is kept follows what is computed, and takes no time."""
    pools = (pool("prefill", pipeline=2), pool("decode", pipeline=2))
    requests = [
        Offered(0.02 * number, 700 + 37 * number, 20, (number % 3, 10 + number % 5)) for number in range(60)
    ]
    digests = set()
    for prefix in ({}, {"bytes_per_s": 1e7}):
        simulated = mesh(*pools, prefix=prefix, instance={"chunk_tokens": 300})
        metrics = measure(simulate(simulated, Load(requests, retries=100)))
        assert metrics.done == 60
        computed = metrics.pools[0].chunk_tokens
        assert computed + metrics.pools[0].hit_tokens == sum(each.prompt_tokens for each in requests)
        digests.add(metrics.digest)
    assert len(digests) == 2
