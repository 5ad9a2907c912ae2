"""The workload's profile: what it says of traffic of known laws, and when it says that this has changed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.workload import KEPT_WINDOWS, WorkloadProfiler

WINDOW_S = 10.0
SEEDS = st.integers(0, 1 << 30)


class Traffic:
    """Poisson arrivals with lengths of a given mean, window by window."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.profiler = WorkloadProfiler(0.0)

    def window(self, rate_per_s: float, prompt_tokens: int = 500) -> tuple[str, ...]:
        """One window; what has changed."""
        end_s = self.now + WINDOW_S
        at_s = self.now
        while rate_per_s and (at_s := at_s + self.chance.expovariate(rate_per_s)) < end_s:
            self.profiler.arrive(round(self.chance.expovariate(1 / prompt_tokens)), at_s)
            self.profiler.end(round(self.chance.expovariate(1 / 100)))
        self.now = end_s
        return self.profiler.close(end_s)


def test_a_known_workload_is_told() -> None:
    traffic = Traffic(3)
    for _ in range(KEPT_WINDOWS):
        traffic.window(5.0)
    found = traffic.profiler.workload
    assert found is not None
    assert found.rate_per_s == pytest.approx(5.0, rel=0.1)
    assert found.arrival_variation == pytest.approx(1.0, rel=0.15), "Poisson's"
    assert found.prompts.mean == pytest.approx(500, rel=0.1)
    assert found.outputs.mean == pytest.approx(100, rel=0.1)
    assert found.outputs.squared_variation == pytest.approx(1.0, rel=0.2)
    assert found.relative_error < 0.06


def test_bursts_are_planned_for_and_the_chance_of_single_arrivals_is_not() -> None:
    even, bursts = Traffic(3), Traffic(3)
    for window in range(KEPT_WINDOWS):
        even.window(20.0)
        bursts.window(12.0 if window % 2 else 28.0)
    found = even.profiler.workload
    assert found is not None
    assert found.busy_rate_per_s == pytest.approx(found.rate_per_s, rel=0.15)
    found = bursts.profiler.workload
    assert found is not None
    assert found.rate_per_s == pytest.approx(20.0, rel=0.1)
    assert found.busy_rate_per_s == pytest.approx(28.0, rel=0.15)


def test_nothing_is_said_before_the_first_window_has_ended() -> None:
    profiler = WorkloadProfiler(0.0)
    profiler.arrive(10, 1.0)
    assert profiler.workload is None


JUMPS = ((5.0, 3.0), (10.0, 1 / 3), (20.0, 3.0), (20.0, 1 / 3), (50.0, 3.0), (50.0, 1 / 3))
"""Requests a second, and by how much that changes. Of falls from 5 a second one in ninety takes longer."""


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from(JUMPS))
def test_a_jump_of_the_rate_is_seen_within_three_windows_and_what_was_before_counts_no_more(
    seed: int, jump: tuple[float, float]
) -> None:
    rate_per_s, factor = jump
    traffic = Traffic(seed)
    for _ in range(12):
        traffic.window(rate_per_s)
    changed = [traffic.window(factor * rate_per_s) for _ in range(3)]
    assert any("rate" in each for each in changed)
    for _ in range(8):
        traffic.window(factor * rate_per_s)
    found = traffic.profiler.workload
    assert found is not None
    assert found.rate_per_s == pytest.approx(factor * rate_per_s, rel=0.5)


def test_longer_prompts_are_seen_though_as_many_come() -> None:
    traffic = Traffic(1)
    for _ in range(12):
        traffic.window(10.0)
    changed = {name for _ in range(2) for name in traffic.window(10.0, prompt_tokens=1500)}
    assert "prompt length" in changed
    assert "output length" not in changed


def test_a_drift_too_slow_for_any_window_to_stand_out_is_seen_in_the_end() -> None:
    traffic = Traffic(2)
    for _ in range(12):
        traffic.window(20.0)
    changed = [traffic.window(20.0 * 1.05**step) for step in range(1, 20)]
    assert any("rate" in each for each in changed)


def test_chance_alone_rarely_looks_like_a_change() -> None:
    traffic = Traffic(4)
    changes = sum(bool(traffic.window(8.0)) for _ in range(1000))
    assert changes <= 10, f"{changes} of 1,000 windows"


def test_memory_is_bounded_and_silence_forgets_no_lengths() -> None:
    traffic = Traffic(5)
    for _ in range(5 * KEPT_WINDOWS):
        traffic.window(2.0)
    for _ in range(2 * KEPT_WINDOWS):
        traffic.window(0.0)
    profiler = traffic.profiler
    assert max(len(profiler._rates.windows), len(profiler._prompts.windows)) <= KEPT_WINDOWS
    assert len(profiler._gaps) <= KEPT_WINDOWS
    found = profiler.workload
    assert found is not None
    assert found.rate_per_s == 0
    assert found.prompts.mean == pytest.approx(500, rel=0.3)
