"""The searches of DistServe, Vidur and Lamina, in worlds whose capacities are known and by their formulas."""

import math
from dataclasses import replace
from itertools import product

import msgspec
import pytest

from common.devices import A100, DEVICES, H20, H100
from common.latency import ServiceObjectives
from common.messages import Role
from common.shapes import LLAMA3_70B
from services.bench.traces import TraceRequest
from services.planner.attention_ratio import choose_ratio
from services.planner.budget import Budget
from services.planner.candidates import InstanceKind, PoolPlan, SearchSpace, kinds_of
from services.planner.distserve_search import (
    pair_nodes,
    place_with_high_affinity,
    place_with_low_affinity,
)
from services.planner.goodput import served_by
from services.planner.probes import Point, Probe
from services.planner.samples import Sample
from services.planner.simulating import Conditions, run_probe
from services.planner.vidur_search import VidurPoint, pareto_front, search_capacities, within
from tests.services.planner.worlds import (
    CATALOGUE,
    Capacities,
    bounds_in,
    kind_of,
    point,
    search_with,
    search_world,
    staged,
)

PAIR_ROLES: tuple[Role, ...] = ("prefill", "decode")
SAMPLE = Sample(5_000)
SERVED = served_by(0.9)
PLACED = {
    kind_of("prefill", tensor=1): 1.7,
    kind_of("prefill", tensor=2): 5.0,
    kind_of("prefill", "h100", 2): 4.8,
    kind_of("decode", tensor=1): 3.0,
    kind_of("decode", tensor=4): 11.0,
}


def roles(world: Capacities, role: str) -> list[InstanceKind]:
    return [kind for kind in world if kind.role == role]


def test_distserve_s_first_algorithm_replicates_the_best_of_each_phase() -> None:
    found, _ = search_world(
        place_with_high_affinity(
            roles(PLACED, "prefill"), roles(PLACED, "decode"), bounds_in(PLACED), SERVED, SAMPLE, 20.0
        ),
        PLACED,
    )
    assert found is not None
    assert found.prefill.kind == kind_of("prefill", tensor=2)
    assert found.decode.kind == kind_of("decode", tensor=1)
    assert found.prefill.count == math.ceil(20 / found.prefill.goodput_per_s)
    per_device = [each.per_device for each in found.tried]
    assert per_device == sorted(per_device, reverse=True)


def test_of_distserve_s_phases_others_than_the_best_may_take_fewer_devices() -> None:
    """Two prefill instances of two for 6 a second, where four of one would do for 6.8."""
    world = {
        kind_of("prefill", tensor=2): 3.5,
        kind_of("prefill", tensor=1): 1.7,
        kind_of("prefill", tensor=3): 6.2 / 1.3,
        kind_of("decode", tensor=4): 11.0,
        kind_of("decode", tensor=1): 2.6,
    }
    for rate in (1.0, 4.5, 6.0, 20.0):
        search = place_with_high_affinity(
            roles(world, "prefill"), roles(world, "decode"), bounds_in(world), SERVED, SAMPLE, rate
        )
        found, _ = search_world(search, world)
        assert found is not None
        least = min(
            prefill.count * prefill.kind.devices + decode.count * decode.kind.devices
            for prefill, decode in product(found.tried, repeat=2)
            if (prefill.kind.role, decode.kind.role) == PAIR_ROLES
        )
        fewest = found.least(lambda each: each.devices)
        assert fewest.devices == least <= found.deployment.devices
        assert tuple(pool.kind.role for pool in fewest.pools) == PAIR_ROLES


def test_distserve_s_first_algorithm_finds_nothing_where_a_phase_has_nothing() -> None:
    world = {kind_of("prefill"): 0.0, kind_of("decode"): 1.0}
    search = place_with_high_affinity(
        roles(world, "prefill"), roles(world, "decode"), bounds_in(world), SERVED, SAMPLE, 1.0
    )
    assert search_world(search, world)[0] is None


def test_distserve_s_second_algorithm_keeps_both_in_one_node_and_its_links() -> None:
    found, _ = search_world(
        place_with_low_affinity(
            roles(PLACED, "prefill"),
            roles(PLACED, "decode"),
            bounds_in(PLACED),
            SERVED,
            SAMPLE,
            20.0,
            DEVICES,
            4,
        ),
        PLACED,
    )
    best = {
        (first, second): min(PLACED[first], PLACED[second]) / (first.devices + second.devices)
        for first, second in product(roles(PLACED, "prefill"), roles(PLACED, "decode"))
        if first.device == second.device and first.devices + second.devices <= 4
    }
    assert len(found) == len(best)
    assert tuple(pool.kind for pool in found[0].deployment.pools) == max(best, key=lambda pair: best[pair])
    for pool in found[0].deployment.pools:
        assert pool.link_bytes_per_s == pool.kind.devices * DEVICES[pool.kind.device].interchip_gb_s * 1e9


def test_a_pair_that_no_node_holds_has_corresponding_stages_in_each_of_several() -> None:
    prefill, decode, alone = staged("prefill", 4, 2), staged("decode", 2, 4), staged("decode", 8, 1)
    world = {prefill: 4.0, decode: 2.0, alone: 9.0}
    crossed = {msgspec.structs.replace(each, nodes=2): capacity for each, capacity in world.items()}
    found, _ = search_world(
        place_with_low_affinity(
            (prefill,), (decode, alone), bounds_in(world), SERVED, SAMPLE, 3.0, DEVICES, 8
        ),
        {**world, **crossed},
    )
    (pair,) = found
    assert [pool.kind.nodes for pool in pair.deployment.pools] == [2, 2]
    assert [pool.kind.own_devices for pool in pair.deployment.pools] == [8, 8]
    assert pair.count == math.ceil(3.0 / pair.goodput_per_s)
    for pool in pair.deployment.pools:
        assert pool.link_bytes_per_s == pool.kind.devices * DEVICES["a100"].interchip_gb_s * 1e9


@pytest.mark.parametrize(
    ("first", "second", "nodes"),
    [
        ((4, 1), (4, 1), 1),
        ((8, 1), (8, 1), None),
        ((4, 2), (4, 2), 2),
        ((4, 2), (4, 1), None),
        ((2, 4), (6, 4), 4),
        ((1, 6), (2, 3), 3),
        ((8, 2), (8, 2), None),
    ],
)
def test_stages_share_as_few_nodes_as_hold_them(
    first: tuple[int, int], second: tuple[int, int], nodes: int | None
) -> None:
    assert pair_nodes(staged("prefill", *first), staged("decode", *second), 8 if nodes != 3 else 4) == nodes


def test_stages_that_a_node_does_not_hold_are_spread_evenly_where_the_space_has_nodes() -> None:
    def found(nodes: int) -> dict[tuple[int, int], int]:
        space = SearchSpace(devices=(A100,), tensors=(4, 8), pipelines=(1, 2, 3, 4), nodes=nodes)
        kinds = kinds_of(space, LLAMA3_70B, 2, Budget()).decode
        return {(kind.tensor, kind.pipeline): kind.nodes for kind in kinds}

    assert found(1) == {(4, 1): 1, (4, 2): 1, (8, 1): 1}
    assert found(2) == {**found(1), (8, 2): 2, (4, 4): 2}
    assert found(4) == {**found(2), (4, 3): 3, (8, 3): 3, (8, 4): 4}


def test_a_pipeline_over_several_nodes_hands_on_over_the_network() -> None:
    conditions = Conditions(
        shape=LLAMA3_70B,
        rows=(TraceRequest(None, 800, 40),) * 40,
        objectives=ServiceObjectives(ttft_s=5.0, tpot_s=0.5),
    )
    seconds = []
    for nodes in (1, 2):
        pools = tuple(PoolPlan(kind=staged(role, 4, 2, nodes), count=1) for role in PAIR_ROLES)
        seconds.append(run_probe(Probe(pools=pools, rate_per_s=0.5, requests=40), conditions).ttft_s[0])
    assert seconds[1] > seconds[0]


def test_vidur_s_search_ranks_by_what_a_dollar_serves() -> None:
    world = {kind_of("mixed"): 2.0, kind_of("mixed", "h100"): 4.0, kind_of("mixed", tensor=2): 3.0}
    kinds = list(world)

    def waits(probe: Probe) -> Point:
        served = probe.rate_per_s <= world[probe.pools[0].kind]
        return msgspec.structs.replace(point(), queue_p99_s=1.0 if served else 6.0)

    found = search_with(search_capacities(kinds, bounds_in(world), CATALOGUE, SAMPLE), waits)
    assert [each.kind for each in found] == [kinds[0], kinds[1], kinds[2]]
    assert found[0].requests_per_usd == pytest.approx(3600 * found[0].capacity_per_s / 1.0)
    measured = point()
    best = found[0]
    assert (best.ttft_p90_s, best.tpot_p90_s, best.end_to_end_p90_s) == (
        measured.ttft_s[1],
        measured.tpot_s[1],
        measured.end_to_end_s[1],
    )
    assert best.tbt_p99_s == measured.tbt_s[3]


def vidur_point(value: float, ttft_s: float, tbt_s: float = 0.1) -> VidurPoint:
    return VidurPoint(kind_of("mixed"), 1.0, value, ttft_s, tbt_s, 0.05, 4.0)


def test_the_pareto_front_has_whoever_nobody_betters() -> None:
    points = [vidur_point(*each) for each in ((5, 1.0), (4, 0.5), (4, 0.6), (7, 2.0), (6, 3.0), (1, 0.1))]
    front = pareto_front(points, lambda each: each.ttft_p90_s)
    undominated = [
        each
        for each in points
        if not any(
            other.requests_per_usd >= each.requests_per_usd
            and other.ttft_p90_s <= each.ttft_p90_s
            and other != each
            for other in points
        )
    ]
    assert sorted(front, key=lambda each: each.ttft_p90_s) == sorted(
        undominated, key=lambda each: each.ttft_p90_s
    )
    assert within(points, ServiceObjectives(ttft_s=0.55)) == [points[1], points[5]]


def test_lamina_s_ratio_is_the_most_tokens_per_dollar_within_the_step() -> None:
    found = choose_ratio(LLAMA3_70B, 8192, 2, [H100, H20], most_devices=8, step_s=0.1)
    assert all(each.throughput.step_s <= 0.1 and each.devices <= 8 for each in found)
    assert [each.tokens_usd for each in found] == sorted((each.tokens_usd for each in found), reverse=True)
    free = choose_ratio(LLAMA3_70B, 8192, 2, [H100, H20], most_devices=8, step_s=None)
    assert free[0].tokens_usd >= found[0].tokens_usd
    dear = replace(H20, price_usd_h=40.0)
    others = choose_ratio(LLAMA3_70B, 8192, 2, [H100, dear], most_devices=8, step_s=0.1)
    assert others[0].attention_device != "h20"
