"""Splitwise's provisioning, in worlds whose capacities are known (IV-D, Table VI)."""

from itertools import product

import msgspec
import pytest

from services.planner.bounds import Bound
from services.planner.budget import Budget, budget_of
from services.planner.candidates import Deployment
from services.planner.demand import price_usd_h, provisioned_w
from services.planner.probes import Point, Probe
from services.planner.provisioning import (
    TABLE_VI,
    Design,
    cheapest,
    fewest_by_bounds,
    has_met_nine,
    missed,
    most_throughput,
)
from tests.services.planner.worlds import (
    CATALOGUE,
    answer,
    bounds_in,
    kind_of,
    point,
    search_with,
)

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
