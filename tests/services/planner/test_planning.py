"""The search against looking at everything, in worlds whose capacities are known."""

import random

import msgspec
import pytest

from services.planner.candidates import Deployment, PoolPlan
from services.planner.checkpoint import Checkpoint
from services.planner.demand import Objective, Proposed, price_usd_h, provisioned_w
from services.planner.driver import Here, drive
from services.planner.finalists import limit_of, settle
from services.planner.planning import attention_verdict, plan, verdict
from services.planner.probes import Point, PoolPoint, Probe
from services.planner.report import file_of, summary_of
from tests.services.planner.worlds import (
    CATALOGUE,
    Capacities,
    answer,
    attention_kind,
    bounds_in,
    demand_of,
    kind_of,
    kinds_in,
    least_burden,
    point,
    search_world,
)

REQUESTS = 5_000
SEEN_FINELY = 1.10
"""Capacities are known to some per cent only: a count at the edge of a whole number may be one more."""


def random_world(seed: int) -> Capacities:
    generator = random.Random(seed)
    return {
        kind_of(role, device, tensor, batch): generator.uniform(0.5, 4.0) * tensor**0.9
        for role in ("mixed", "prefill", "decode")
        for device in ("a100", "h100")
        for tensor in (1, 2, 4)
        for batch in (32, 64)
    } | {
        attention_kind(tensor, workers): generator.uniform(1.0, 6.0)
        for tensor in (1, 2)
        for workers in (1, 4)
    }


@pytest.mark.parametrize("objective", ["cost", "power", "throughput"])
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_what_looking_at_everything_finds(objective: Objective, seed: int) -> None:
    world = random_world(seed)
    demand = demand_of(objective, rate=9.0, most=16 if objective == "throughput" else None)
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS), world)
    best, least = found.ranked[0], least_burden(world, demand)
    if objective == "throughput":
        assert -least / SEEN_FINELY <= best.rate_per_s <= -least
    else:
        # Deployments are settled whole: they cost exactly what they have to, or one step more.
        assert least <= best.burden <= least * SEEN_FINELY
    assert [each.burden for each in found.ranked] == sorted(each.burden for each in found.ranked)


def test_most_kinds_are_never_run_to_their_capacity() -> None:
    world = random_world(1)
    demand = demand_of(rate=40.0)
    found, runs = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS), world)
    assert found.configurations == 12 + 12 * (12 + 4)
    assert found.bounded + found.cut + found.measured <= found.kinds
    assert runs < 12 * len(world)


def test_no_deployment_has_more_devices_than_allowed() -> None:
    world = random_world(2)
    found, _ = search_world(
        plan(kinds_in(world), bounds_in(world), demand_of(rate=9.0, most=8), REQUESTS), world
    )
    assert found.ranked
    assert all(each.deployment.devices <= 8 for each in found.ranked)


@pytest.mark.parametrize(
    ("usd_h", "power_w", "most"),
    [(16.0, None, None), (None, 4_000.0, None), (16.0, 4_000.0, None), (30.0, 4_000.0, 10)],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_most_throughput_of_a_budget_is_what_looking_at_everything_finds(
    usd_h: float | None, power_w: float | None, most: int | None, seed: int
) -> None:
    """Splitwise's iso-cost and iso-power, alone and together."""
    world = random_world(seed)
    demand = demand_of("throughput", most=most, usd_h=usd_h, power_w=power_w)
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS), world)
    least = least_burden(world, demand)
    assert -least / SEEN_FINELY <= found.ranked[0].rate_per_s <= -least
    for each in found.ranked:
        assert each.headroom is None
        assert usd_h is None or price_usd_h(each.deployment, CATALOGUE) <= usd_h
        assert power_w is None or (provisioned_w(each.deployment, CATALOGUE) or 0.0) <= power_w
        assert most is None or each.deployment.devices <= most


@pytest.mark.parametrize("objective", ["cost", "power"])
@pytest.mark.parametrize(
    ("usd_h", "power_w", "device"),
    [(7.0, None, "h20"), (None, 2_400.0, "h100"), (None, 2_700.0, None), (8.0, 2_700.0, "h100")],
)
def test_a_rate_is_served_for_the_least_within_a_budget(
    objective: Objective, usd_h: float | None, power_w: float | None, device: str | None
) -> None:
    """Where the cheapest draws too much, or what draws the least is too dear, another is found. They take
    $9, $7.50 and $5.50 an hour, and 2,700, 2,100 and 4,400 W."""
    world = {kind_of("mixed", "a100"): 1.03, kind_of("mixed", "h100"): 3.4, kind_of("mixed", "h20"): 0.86}
    demand = demand_of(objective, 9.0, usd_h=usd_h, power_w=power_w)
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS), world)
    assert found.ranked[0].burden == pytest.approx(least_burden(world, demand))
    devices = [pool.kind.device for each in found.ranked for pool in each.deployment.pools]
    assert devices == (["h100", "a100"] if device is None else [device])


@pytest.mark.parametrize(
    ("usd_h", "power_w", "said"),
    [
        (3.0, None, "none is within --max-cost 3: 10/s would take 4 GPUs at $4.00/h, 4 mixed"),
        (None, 1_100.0, "none is within --max-power 1100: 10/s would take 4 GPUs at 1,200 W, 4 mixed"),
        (
            3.5,
            1_100.0,
            "none is within --max-cost 3.5 and --max-power 1100:"
            " 10/s would take 4 GPUs at $4.00/h and 1,200 W, 4 mixed",
        ),
    ],
)
def test_where_all_are_over_a_budget_it_is_said_what_the_rate_takes_of_it(
    usd_h: float | None, power_w: float | None, said: str
) -> None:
    world = {kind_of("mixed"): 3.0, kind_of("mixed", "h100"): 5.0, kind_of("decode"): 2.0}
    demand = demand_of(rate=10.0, usd_h=usd_h, power_w=power_w)
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS), world)
    assert found.ranked == ()
    assert verdict(found).startswith(said)


def test_where_all_take_more_devices_than_allowed_it_is_said_how_many_the_rate_takes() -> None:
    """Of what a plan without the bound finds the fewest."""
    world = {kind_of("mixed"): 3.0, kind_of("prefill"): 5.0, kind_of("decode"): 2.0}
    demand = demand_of(rate=10.0, most=3)
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand, REQUESTS), world)
    assert found.ranked == ()
    assert found.fewest_over is not None
    assert found.fewest_over.deployment.devices == 4
    assert verdict(found) == (
        "none is within --max-gpus 3: 10/s would take 4 GPUs,"
        " 4 mixed (a100 TP1, chunks of 512, chunked, batch 64), of instances that are each within it"
    )
    assert "1 deployment simulated whole" in list(summary_of(found))[-1]
    written = file_of(found).fewest_over
    assert written is not None
    assert (written.devices, written.usd_h) == (4, 4.0)


def test_what_takes_fewer_devices_than_one_instance_s_capacity_says_is_still_found() -> None:
    """Together two serve what each alone does not serve half of."""
    kind = kind_of("mixed")
    alone = {kind: 4.0}
    demand = demand_of(rate=10.0, most=2)

    def run(probe: Probe) -> Point:
        is_whole = probe.requests == REQUESTS
        return answer(probe, {kind: 5.0} if is_whole else alone)

    with Checkpoint(None) as kept:
        found = drive(plan(kinds_in(alone), bounds_in(alone), demand, REQUESTS), Here(run), kept, b"")
    assert [each.deployment.devices for each in found.ranked] == [2]
    assert found.ranked[0].headroom is not None
    assert found.fewest_over is None


def test_where_something_turns_out_to_be_allowed_nothing_is_said_of_what_is_not() -> None:
    mixed, prefill, decode = kind_of("mixed"), kind_of("prefill"), kind_of("decode")
    alone = {mixed: 4.0, prefill: 6.0, decode: 6.0}
    demand = demand_of(rate=10.0, most=2)

    def run(probe: Probe) -> Point:
        is_whole = probe.requests == REQUESTS
        return answer(probe, alone | {mixed: 5.0} if is_whole else alone)

    with Checkpoint(None) as kept:
        found = drive(plan(kinds_in(alone), bounds_in(alone), demand, REQUESTS), Here(run), kept, b"")
    assert [each.deployment.devices for each in found.ranked] == [2]
    assert found.fewest_over is None
    assert "none is within" not in verdict(found)


@pytest.mark.parametrize(
    ("coupled", "said"),
    [
        (5.0, "disaggregation does not pay here: the best disaggregated deployment has 100.0 % more cost"),
        (1.0, "disaggregation pays: the best disaggregated deployment has 60.0 % less cost"),
        (2.5, "disaggregation does not pay here: the best disaggregated deployment has the same cost"),
        (0.0, "disaggregation is what works here"),
    ],
)
def test_it_is_said_whether_disaggregation_pays(coupled: float, said: str) -> None:
    world = {kind_of("mixed"): coupled, kind_of("prefill"): 5.0, kind_of("decode"): 5.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(), REQUESTS), world)
    assert verdict(found).startswith(said)


def test_of_few_requests_it_is_said_with_that_reserve_that_disaggregation_pays() -> None:
    world = {kind_of("mixed"): 1.0, kind_of("prefill"): 5.0, kind_of("decode"): 5.0}
    search = plan(kinds_in(world), bounds_in(world), demand_of(), REQUESTS, caveat="too few")
    found, _ = search_world(search, world)
    assert verdict(found).endswith(" than the best coupled one, as far as so few requests tell")


@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        (10.0, "attention workers pay: the best deployment with them has 25.0 % less cost"),
        (5.0, "attention workers do not pay here: the best deployment with them has 25.0 % more cost"),
        (0.0, "attention workers do not pay here: no deployment with them"),
    ],
)
def test_it_is_said_whether_attention_workers_pay(capacity: float, said: str) -> None:
    """One costs a dollar for the model and two halves for attention, and a decode instance alone one."""
    world = {
        kind_of("mixed"): 1.0,
        kind_of("prefill"): 10.0,
        kind_of("decode"): 10 / 3,
        attention_kind(): capacity,
    }
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(), REQUESTS), world)
    assert (attention_verdict(found) or "").startswith(said)
    if capacity:
        assert any(each.deployment.has_attention for each in found.ranked)


def test_what_the_best_with_attention_workers_has_to_spare_is_measured_wherever_it_ranks() -> None:
    world = {kind_of("mixed", tensor=tensor): 4.0 * tensor for tensor in (1, 2, 4)}
    world |= {kind_of("prefill"): 4.0, kind_of("decode"): 4.0, attention_kind(): 2.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(), REQUESTS), world)
    place = next(place for place, each in enumerate(found.ranked) if each.deployment.has_attention)
    assert place >= 3
    assert found.ranked[place].headroom is not None
    lines = list(summary_of(found))
    (said,) = (line for line in lines if line.startswith("headroom"))
    assert said.startswith("headroom is measured for the first 3 and the best with attention workers alone")


def test_of_whose_headroom_nothing_was_measured_is_said() -> None:
    """The first three have it; a plan of fewer says nothing of it."""
    world = {kind_of("mixed", device, tensor): 4.0 for device in ("a100", "h100") for tensor in (1, 2)}
    few = {kind_of("mixed"): 4.0}
    told = []
    for each in (world | {kind_of("prefill"): 4.0, kind_of("decode"): 4.0}, few):
        found, _ = search_world(plan(kinds_in(each), bounds_in(each), demand_of(), REQUESTS), each)
        known = [settled.headroom is not None for settled in found.ranked]
        assert known == [True] * min(3, len(known)) + [False] * (len(known) - 3)
        told.append([line for line in summary_of(found) if line.startswith("headroom")])
    assert [len(each) for each in told] == [1, 0]
    assert told[0][0].startswith("headroom is measured for the first 3 alone, as it takes some six runs")


def test_without_such_kinds_nothing_is_said_of_attention_workers() -> None:
    world = {kind_of("mixed"): 4.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(), REQUESTS), world)
    assert attention_verdict(found) is None


def test_where_nothing_keeps_the_objectives_that_is_said() -> None:
    world = {kind_of("mixed"): 0.0, kind_of("prefill"): 0.0, kind_of("decode"): 5.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(), REQUESTS), world)
    assert found.ranked == ()
    assert verdict(found).startswith("nothing keeps the objectives")


def test_what_is_to_spare_is_measured() -> None:
    world = {kind_of("mixed"): 4.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(rate=10.0), REQUESTS), world)
    (best,) = found.ranked
    assert best.deployment.pools[0].count == 3
    assert best.headroom == pytest.approx(0.2, abs=0.06)


def test_what_is_to_spare_beyond_what_was_tried_is_said_to_be_more() -> None:
    world = {kind_of("mixed"): 500.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(rate=10.0), REQUESTS), world)
    (best,) = found.ranked
    assert best.is_open
    assert best.headroom == pytest.approx(7.0, rel=0.06)
    assert best.limit.startswith("nothing up to 7")
    world = {kind_of("mixed"): 40.0}
    found, _ = search_world(plan(kinds_in(world), bounds_in(world), demand_of(rate=10.0), REQUESTS), world)
    (best,) = found.ranked
    assert not best.is_open
    assert best.headroom == pytest.approx(3.0, rel=0.06)


@pytest.mark.parametrize(("left_share", "what"), [(0.1, "work that piles up"), (-0.1, "whole instances")])
def test_where_no_objective_is_missed_the_busiest_pool_is_what_limits(left_share: float, what: str) -> None:
    pools = PoolPlan(kind=kind_of("prefill"), count=1), PoolPlan(kind=kind_of("decode"), count=1)
    busy = PoolPoint(0.35, 0.0, 0.3, 0), PoolPoint(0.99, 8.0, 0.3, 0)
    served = msgspec.structs.replace(point(), pools=busy)
    deployment, demand = Deployment(pools), demand_of()
    beyond = point(left_share=left_share)
    assert (
        limit_of(deployment, demand, served, beyond) == f"{what}: decode instances compute 99 % of the time"
    )
    # Where one is missed, it is the pool that it hangs on.
    late = point(0.5, ttft_share=0.5, tpot_share=1.0)
    said = "first tokens: prefill instances compute 35 % of the time"
    assert limit_of(deployment, demand, served, late) == said


def test_what_a_bound_of_devices_leaves_out_is_not_said_to_miss_its_objectives() -> None:
    world = {kind_of("mixed"): 8.0, kind_of("prefill"): 8.0, attention_kind(): 8.0}
    search = plan(kinds_in(world), bounds_in(world), demand_of(rate=5.0, most=2), REQUESTS)
    found, _ = search_world(search, world)
    within = "that was simulated keeps the objectives within --max-gpus 2"
    said = attention_verdict(found)
    assert said == f"attention workers do not pay here: no deployment with them {within}"
    assert verdict(found).endswith(f"no disaggregated deployment {within}, a coupled one does")
    search = plan(kinds_in(world), bounds_in(world), demand_of(rate=5.0, most=2), REQUESTS, caveat="too few")
    found, _ = search_world(search, world)
    for said in (verdict(found), attention_verdict(found) or ""):
        assert said.endswith(", as far as so few requests tell")
    search = plan(kinds_in(world), bounds_in(world), demand_of(rate=5.0), REQUESTS)
    found, _ = search_world(search, world)
    assert "more cost than the best one without" in (attention_verdict(found) or "")


@pytest.mark.parametrize(("most", "which"), [(None, "other"), (8, "more")])
def test_of_few_requests_nothing_is_said_to_be_impossible(most: int | None, which: str) -> None:
    world = {kind_of("mixed"): 0.0}
    demand = demand_of(most=most)
    search = plan(kinds_in(world), bounds_in(world), demand, REQUESTS, caveat="too few")
    found, _ = search_world(search, world)
    assert verdict(found) == (
        f"nothing keeps the objectives: loosen them, or allow {which} devices, or give more requests"
    )
    assert next(iter(summary_of(found))) == "too few"


def test_where_the_other_pool_is_what_is_short_it_grows_too() -> None:
    """Too few decode instances hold prompts' memory: first tokens are late, and prefill does not help."""
    prefill, decode = kind_of("prefill"), kind_of("decode")
    demand = demand_of(rate=10.0)

    def late(probe: Probe) -> Point:
        counts = [pool.count for pool in probe.pools]
        is_served = counts[0] >= 2 and counts[1] >= 4
        return point() if is_served else point(0.5, ttft_share=0.5, tpot_share=1.0)

    pools = (PoolPlan(kind=prefill, count=2), PoolPlan(kind=decode, count=2))
    search = settle(demand, Proposed(Deployment(pools), 10.0, 0.0), REQUESTS)
    probes = next(search)
    while True:
        try:
            probes = search.send({each: late(each) for each in probes})
        except StopIteration as end:
            settled = end.value
            break
    assert settled is not None
    assert [pool.count for pool in settled.deployment.pools] == [2, 4]
