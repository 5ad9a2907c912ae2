"""The papers' searches, in worlds whose capacities are known and against their own formulas."""

import math
from collections.abc import Callable
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
from services.planner.bounds import Bound, Speed
from services.planner.budget import Budget, budget_of
from services.planner.candidates import Deployment, InstanceKind, PoolPlan, SearchSpace, kinds_of
from services.planner.checkpoint import Checkpoint
from services.planner.demand import price_usd_h, provisioned_w
from services.planner.distserve_search import (
    pair_nodes,
    place_with_high_affinity,
    place_with_low_affinity,
)
from services.planner.driver import Found, Here, drive
from services.planner.goodput import served_by
from services.planner.probes import Point, Probe, Search
from services.planner.provisioning import (
    TABLE_VI,
    Design,
    cheapest,
    fewest_by_bounds,
    has_met_nine,
    missed,
    most_throughput,
)
from services.planner.samples import Sample
from services.planner.searches import law_text
from services.planner.simulating import Conditions, run_probe
from services.planner.vidur_search import VidurPoint, pareto_front, search_capacities, within
from services.planner.worker_configuration import (
    best_workers,
    compute_law,
    fewest_workers,
    worker_law,
    worker_throughput,
)
from services.planner.workload import PlannedWorkload
from services.simulator.performance.linear import LinearPerformance
from services.simulator.shape import PassShape
from tests.services.planner.worlds import (
    CATALOGUE,
    Capacities,
    answer,
    bounds_in,
    kind_of,
    point,
    search_world,
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


def staged(role: Role, tensor: int, pipeline: int, nodes: int = 1) -> InstanceKind:
    return InstanceKind(role=role, device="a100", tensor=tensor, pipeline=pipeline, nodes=nodes)


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


def search_with(search: Search[Found], answer_of: Callable[[Probe], Point]) -> Found:
    with Checkpoint(None) as kept:
        return drive(search, Here(answer_of), kept, b"")


MACHINES = {
    kind_of("prefill", "h100", 8): 7.0,
    kind_of("decode", "h100", 8): 12.0,
    kind_of("decode", "a100", 8): 9.0,
    kind_of("mixed", "h100", 8): 3.0,
}
PROMPT, TOKEN_H, TOKEN_A, MIXED = MACHINES
DESIGNS = (Design("HH", PROMPT, TOKEN_H), Design("HA", PROMPT, TOKEN_A), Design("baseline", MIXED, None))


def slowed(probe: Probe) -> Point:
    served = answer(probe, MACHINES).attainment == 1.0
    return msgspec.structs.replace(point(), slowdowns=(1.0,) * 9 if served else (10.0,) * 9)


def cost(deployment: Deployment) -> float:
    return price_usd_h(deployment, CATALOGUE)


def test_splitwise_s_cheapest_machines_are_what_looking_at_all_counts_finds() -> None:
    found = search_with(cheapest(DESIGNS, bounds_in(MACHINES), cost, 50.0, 5_000, Budget()), slowed)
    counts = {each.design.name: tuple(pool.count for pool in each.deployment.pools) for each in found}
    assert counts == {"HH": (8, 5), "HA": (8, 6), "baseline": (17,)}
    costs = [cost(each.deployment) for each in found]
    assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("most", "usd_h", "power_w"),
    [
        *((most, None, None) for most in (8, 103, 104, 112, 136, 400)),
        *((None, usd_h, None) for usd_h in (20.0, 207.9, 208.0, 259.9, 260.0, 340.0)),
        *((None, None, power_w) for power_w in (5_600.0, 59_199.0, 59_200.0, 72_800.0, 95_200.0)),
        (112, 250.0, 60_000.0),
        (112, 260.0, 60_000.0),
    ],
)
def test_splitwise_s_cheapest_machines_within_a_budget_are_too(
    most: int | None, usd_h: float | None, power_w: float | None
) -> None:
    budget = budget_of(list(CATALOGUE.values()), most, usd_h, power_w)
    found = search_with(cheapest(DESIGNS, bounds_in(MACHINES), cost, 50.0, 5_000, budget), slowed)
    costs = {
        design.name: [
            cost(deployment)
            for prompts, tokens in product(range(1, 40), range(1, 40) if design.token else [0])
            if is_within(deployment := design.deployment(prompts, tokens), most, usd_h, power_w)
            and answer_rate(design, prompts, tokens) >= 50.0
        ]
        for design in DESIGNS
    }
    assert {each.design.name: cost(each.deployment) for each in found} == {
        name: min(each) for name, each in costs.items() if each
    }
    assert all(is_within(each.deployment, most, usd_h, power_w) for each in found)


def is_within(deployment: Deployment, most: int | None, usd_h: float | None, power_w: float | None) -> bool:
    watts = provisioned_w(deployment, CATALOGUE)
    assert watts is not None
    return (
        (most is None or deployment.devices <= most)
        and (usd_h is None or cost(deployment) <= usd_h)
        and (power_w is None or watts <= power_w)
    )


def test_no_fewer_machines_than_by_their_bounds_serve_a_rate() -> None:
    bounds = bounds_in(MACHINES, slack=1.0)
    fewest = [fewest_by_bounds(design, bounds, 50.0) for design in DESIGNS]
    assert [each.devices for each in fewest if each is not None] == [8 * (8 + 5), 8 * (8 + 6), 8 * 17]
    assert fewest_by_bounds(DESIGNS[0], {**bounds, TOKEN_H: Bound(0.0, 0.0)}, 50.0) is None


@pytest.mark.parametrize(
    ("most", "usd_h", "power_w"),
    [
        (160, None, None),
        (None, 400.0, None),
        (None, None, 112_000.0),
        (160, 300.0, None),
        (120, 300.0, 70_000.0),
    ],
)
def test_splitwise_s_most_throughput_is_what_looking_at_all_splits_finds(
    most: int | None, usd_h: float | None, power_w: float | None
) -> None:
    budget = budget_of(list(CATALOGUE.values()), most, usd_h, power_w)
    found = search_with(most_throughput(DESIGNS, bounds_in(MACHINES), budget, 5_000), slowed)
    assert len(found) == len(DESIGNS)
    for each in found:
        best = max(
            answer_rate(each.design, prompts, tokens)
            for prompts, tokens in product(range(1, 60), range(1, 60) if each.design.token else [0])
            if is_within(each.design.deployment(prompts, tokens), most, usd_h, power_w)
        )
        assert best / 1.05 <= each.rate_per_s <= best
        assert is_within(each.deployment, most, usd_h, power_w)


def answer_rate(design: Design, prompts: int, tokens: int) -> float:
    return min(pool.count * MACHINES[pool.kind] for pool in design.deployment(prompts, tokens).pools)


def test_all_nine_bounds_of_table_vi_count() -> None:
    assert has_met_nine(msgspec.structs.replace(point(), slowdowns=TABLE_VI))
    for number in range(9):
        over = tuple(value + 0.01 * (place == number) for place, value in enumerate(TABLE_VI))
        found = msgspec.structs.replace(point(), slowdowns=over)
        assert not has_met_nine(found)
        assert len(missed(found)) == 1
    assert not has_met_nine(point())


WORKLOAD = PlannedWorkload(1_000, 500.0, 200.0, 600.0, (500,), None)


def speed(devices: int, kv_tokens: int) -> Speed:
    return Speed(LinearPerformance(step_s=0.01 + 0.04 / devices, per_sequence_s=1e-4), kv_tokens)


def test_aladdin_s_worker_is_bound_by_memory_or_by_the_time_per_token() -> None:
    kind = kind_of("mixed", tensor=2)
    by_memory = worker_throughput(kind, speed(2, 6_000), WORKLOAD, 0.05)
    assert by_memory is not None
    assert (by_memory.batch, by_memory.is_slo_bound) == (10, False)
    assert by_memory.tokens_per_device_s == pytest.approx(10 / (2 * 0.031))
    by_time = worker_throughput(kind, speed(2, 10_000_000), WORKLOAD, 0.05)
    assert by_time is not None
    assert by_time.is_slo_bound
    assert by_time.step_s <= 0.05 < speed(2, 0).performance.pass_s(PassShape((), by_time.batch + 1, 1))
    assert by_time.tokens_per_device_s == pytest.approx(by_time.batch / (2 * 0.05))
    assert worker_throughput(kind, speed(2, 500), WORKLOAD, 0.05) is None
    assert worker_throughput(kind, speed(2, 6_000), WORKLOAD, 0.01) is None


def test_aladdin_s_best_worker_has_the_most_per_device_and_its_law_is_found_again() -> None:
    kinds = [kind_of("mixed", tensor=tensor) for tensor in (1, 2, 4)]
    speeds = {kind: speed(kind.devices, 60_000 * kind.devices) for kind in kinds}
    ranked = best_workers(kinds, speeds, WORKLOAD, 0.05)
    assert [each.tokens_per_device_s for each in ranked] == sorted(
        (each.tokens_per_device_s for each in ranked), reverse=True
    )
    law = compute_law(kinds, speeds, 1, 1)
    assert law is not None
    assert [law.k4_s, law.c4_s] == pytest.approx([0.04, 0.0101])


@pytest.mark.parametrize(
    ("k5_s", "c5", "text"),
    [(0.25, -1.5, "⌈0.25 · rate -1.5⌉"), (-7.08e-17, 1.0, "⌈1⌉"), (0.5, 2e-16, "⌈0.5 · rate⌉")],
)
def test_what_a_law_has_nearly_nothing_of_is_no_term(k5_s: float, c5: float, text: str) -> None:
    assert law_text(k5_s, c5) == text


def test_no_law_is_fitted_over_one_number_of_devices() -> None:
    staged_alike = [staged("mixed", 4, 1), staged("mixed", 2, 2)]
    speeds = {kind: speed(kind.devices, 60_000) for kind in staged_alike}
    assert compute_law(staged_alike, speeds, 1, 1) is None
    assert compute_law(staged_alike[:1], speeds, 1, 1) is None


@pytest.mark.parametrize("least", [0, 1, 3, 5])
def test_the_fewest_workers_are_found_from_any_that_cannot_be_enough(least: int) -> None:
    world = {kind_of("mixed"): 2.1}
    kind = kind_of("mixed")
    assert search_world(fewest_workers(kind, SERVED, 10.0, 5_000, least), world)[0] == 5


@pytest.mark.parametrize(
    ("enough", "fewest"),
    [
        ({3, 5, 6, 7, 8, 9, 10}, 3),
        (set(range(200, 300)), 200),
        (set(range(300)) - {2, 4, 7} - {0, 1}, 3),
        (set(), None),
    ],
)
def test_workers_are_counted_up_as_more_may_do_worse(enough: set[int], fewest: int | None) -> None:
    """Four that are too few, by a few requests, do not say that three are."""
    asked: list[int] = []
    search = fewest_workers(kind_of("mixed"), SERVED, 10.0, 5_000, 1)
    found: int | None = -1
    point_of_last: dict[Probe, Point] = {}
    while found == -1:
        try:
            [probe] = search.send(point_of_last) if asked else next(search)
        except StopIteration as end:
            found = end.value
        else:
            asked.append(probe.pools[0].count)
            point_of_last = {probe: point(float(asked[-1] in enough))}
    assert found == fewest
    assert len(asked) == len(set(asked)) < 200


def test_workers_are_a_line_over_the_rate() -> None:
    world = {kind_of("mixed"): 2.0}
    law, _ = search_world(worker_law(kind_of("mixed"), SERVED, (10.0, 20.0, 40.0), 5_000, 3.1), world)
    assert law is not None
    assert [count for _, count in law.seen] == [5, 10, 20]
    assert law.workers(30.0) == 15


def test_lamina_s_ratio_is_the_most_tokens_per_dollar_within_the_step() -> None:
    found = choose_ratio(LLAMA3_70B, 8192, 2, [H100, H20], most_devices=8, step_s=0.1)
    assert all(each.throughput.step_s <= 0.1 and each.devices <= 8 for each in found)
    assert [each.tokens_usd for each in found] == sorted((each.tokens_usd for each in found), reverse=True)
    free = choose_ratio(LLAMA3_70B, 8192, 2, [H100, H20], most_devices=8, step_s=None)
    assert free[0].tokens_usd >= found[0].tokens_usd
    dear = replace(H20, price_usd_h=40.0)
    others = choose_ratio(LLAMA3_70B, 8192, 2, [H100, dear], most_devices=8, step_s=0.1)
    assert others[0].attention_device != "h20"
