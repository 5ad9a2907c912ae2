"""Arrival processes."""

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from services.bench.arrivals import fixed_arrivals, make_arrivals, poisson_arrivals


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


@pytest.mark.parametrize(("process", "rate_per_s"), [("poisson", 0.0), ("fixed", -1.0), ("bursts", 1.0)])
def test_wrong_processes_and_rates_are_refused(process: str, rate_per_s: float) -> None:
    with pytest.raises(ConfigError):
        make_arrivals(process, rate_per_s, seed=0)
