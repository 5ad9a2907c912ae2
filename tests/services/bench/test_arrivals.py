"""Arrival processes."""

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from services.bench.arrivals import (
    burstiness_of,
    fixed_arrivals,
    gamma_arrivals,
    make_arrivals,
    poisson_arrivals,
)


def test_fixed_arrivals_do_not_drift() -> None:
    times_s = list(islice(fixed_arrivals(3.0), 30_001))
    assert times_s[0] == 0.0
    assert times_s[30_000] == 10_000.0


@given(st.floats(0.01, 1000.0), st.integers(0, 2**32))
def test_poisson_arrivals_rise_and_repeat_with_their_seed(rate_per_s: float, seed: int) -> None:
    times_s = list(islice(poisson_arrivals(rate_per_s, seed), 50))
    assert all(earlier < later for earlier, later in pairwise([0.0, *times_s]))
    assert times_s == list(islice(poisson_arrivals(rate_per_s, seed), 50))


def test_poisson_gaps_have_the_mean_and_the_deviation_of_an_exponential() -> None:
    gaps_s = [later - earlier for earlier, later in pairwise(islice(poisson_arrivals(4.0, 1), 20_000))]
    assert statistics.mean(gaps_s) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps_s) == pytest.approx(0.25, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gaps_of_a_burstiness_deviate_by_its_root(burstiness: float) -> None:
    times_s = list(islice(make_arrivals("poisson", 4.0, 1, burstiness), 40_000))
    assert times_s == list(islice(gamma_arrivals(4.0, 1, burstiness), 40_000))
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert min(gaps_s) >= 0.0
    assert statistics.mean(gaps_s) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps_s) == pytest.approx(0.25 * burstiness**-0.5, rel=0.03)
    assert burstiness_of(times_s) == pytest.approx(burstiness, rel=0.06)


def test_a_burstiness_of_one_is_poisson_s() -> None:
    poisson_s, one_s = (list(islice(make_arrivals("poisson", 4.0, 1, *each), 50)) for each in ((), (1.0,)))
    assert one_s == poisson_s


def test_what_has_no_bursts_to_measure_has_none() -> None:
    for arrivals_s in ([], [0.0, 1.0], [2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0]):
        assert burstiness_of(arrivals_s) is None
    assert burstiness_of([0.0, 0.5, 2.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(("tick_s", "is_told"), [(0.01, True), (0.1, False), (3.0, False)])
def test_a_clock_s_ticks_are_no_bursts(tick_s: float, is_told: bool) -> None:
    """Ten a second, told in whole ticks."""
    times_s = [tick_s * int(each_s / tick_s) for each_s in islice(poisson_arrivals(10.0, 1), 20_000)]
    found = burstiness_of(times_s)
    assert (found is not None) == is_told
    if found is not None:
        assert found == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize(
    ("process", "burstiness"), [("poisson", 0.0), ("poisson", float("nan")), ("fixed", 0.5)]
)
def test_a_burstiness_that_makes_no_sense_is_refused(process: str, burstiness: float) -> None:
    with pytest.raises(ConfigError) as caught:
        make_arrivals(process, 1.0, 0, burstiness)
    assert caught.value.key == "--burstiness"


@pytest.mark.parametrize(("process", "rate_per_s"), [("poisson", 0.0), ("fixed", -1.0), ("bursts", 1.0)])
def test_wrong_processes_and_rates_are_refused(process: str, rate_per_s: float) -> None:
    with pytest.raises(ConfigError):
        make_arrivals(process, rate_per_s, seed=0)
