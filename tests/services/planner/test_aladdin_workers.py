"""Aladdin's workers: how many GPUs one has, and how many of them a rate takes (4, equations 5 to 7)."""

import pytest

from services.planner.bounds import Speed
from services.planner.goodput import served_by
from services.planner.probes import Point, Probe
from services.planner.searches import law_text
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
    kind_of,
    point,
    search_world,
    staged,
)

SERVED = served_by(0.9)
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
