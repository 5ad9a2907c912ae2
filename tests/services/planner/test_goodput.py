"""The bisection, and what counts as served."""

import math
from collections.abc import Callable

import pytest

from services.planner.candidates import PoolPlan
from services.planner.goodput import Capacity, find_capacity, served_by
from services.planner.probes import Point, Probe, Search
from tests.services.planner.worlds import kind_of, point


def probe_at(rate_per_s: float) -> Probe:
    return Probe(pools=(PoolPlan(kind=kind_of("mixed"), count=1),), rate_per_s=rate_per_s, requests=100)


def run(search: Search[Capacity], answer: Callable[[float], Point]) -> tuple[Capacity, list[float]]:
    asked: list[float] = []
    probes = next(search)
    while True:
        (probe,) = probes
        asked.append(probe.rate_per_s)
        try:
            probes = search.send({probe: answer(probe.rate_per_s)})
        except StopIteration as end:
            return end.value, asked


def up_to(capacity: float) -> Callable[[float], Point]:
    return lambda rate: point(1.0 if rate <= capacity else 0.0)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 4.7, 9.9])
@pytest.mark.parametrize("high", [10.0, math.inf])
def test_it_ends_close_below_the_capacity(capacity: float, high: float) -> None:
    found, asked = run(find_capacity(probe_at, served_by(0.9), high, tolerance=1.03), up_to(capacity))
    assert capacity / 1.03 <= found.rate_per_s <= capacity
    assert max(asked) < high
    assert found.point is not None


def test_with_a_guess_it_takes_fewer_runs() -> None:
    _, blind = run(find_capacity(probe_at, served_by(0.9), 100.0), up_to(5.0))
    _, told = run(find_capacity(probe_at, served_by(0.9), 100.0, low=4.9, tolerance=1.5), up_to(5.0))
    assert len(told) < len(blind)


def test_what_cannot_reach_the_least_is_given_up_after_one_run() -> None:
    found, asked = run(find_capacity(probe_at, served_by(0.9), 10.0, least=6.0), up_to(5.0))
    assert found.is_cut
    assert asked == [6.0]


def test_nothing_at_all_is_found_to_be_nothing() -> None:
    found, _ = run(find_capacity(probe_at, served_by(0.9), 10.0), up_to(0.0))
    assert found.rate_per_s == 0.0
    assert found.point is None


@pytest.mark.parametrize(
    ("met", "left_share", "is_served"), [(0.9, 0.0, True), (0.89, 0.0, False), (1.0, 0.01, False)]
)
def test_a_rate_is_served_where_the_goal_is_met_and_nothing_piles_up(
    met: float, left_share: float, is_served: bool
) -> None:
    assert served_by(0.9)(point(met, left_share)) is is_served
