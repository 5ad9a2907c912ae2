"""Tables over tokens: values, sums in constant time, growth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.performance.curves import FIRST_CURVES, BatchCurves, ChunkSurface, TokenCurve
from services.simulator.performance.files import FloatArray


def bent(tokens: FloatArray) -> FloatArray:
    return np.asarray(3.0 + 0.5 * tokens + 7.0 * np.sin(tokens / 90), dtype=np.float64)


@given(
    tokens=st.integers(0, 40_000),
    fraction=st.sampled_from((0.0, 0.25, 1 / 3, 0.999)),
    steps=st.integers(0, 300),
    grid=st.sampled_from((1, 4, 16, 64)),
)
def test_the_sum_of_steps_is_that_of_their_values(
    tokens: int, fraction: float, steps: int, grid: int
) -> None:
    curve = TokenCurve(bent, grid)
    expected = sum(curve.at(tokens + fraction + step) for step in range(steps))
    assert curve.total(tokens + fraction, steps) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_it_is_what_it_was_made_from_at_its_grid_and_linear_between() -> None:
    curve = TokenCurve(bent, 16)
    assert curve.at(32) == pytest.approx(float(bent(np.array([32.0]))[0]))
    assert curve.at(40) == pytest.approx((curve.at(32) + curve.at(48)) / 2)


def test_it_grows_when_asked_for_more_and_says_the_same_as_before() -> None:
    asked: list[float] = []

    def evaluate(tokens: FloatArray) -> FloatArray:
        asked.append(float(tokens[-1]))
        return 2.0 * tokens

    curve = TokenCurve(evaluate, 8)
    first = curve.at(100.5)
    assert curve.at(1_000_000) == pytest.approx(2_000_000)
    assert curve.at(100.5) == first
    assert len(asked) == 2


def test_what_would_be_a_time_under_nothing_is_none() -> None:
    assert TokenCurve(lambda tokens: tokens - 100.0, 4).at(50) == 0


def test_each_batch_has_a_curve_of_its_own() -> None:
    curves = BatchCurves(lambda sequences, contexts: sequences * contexts, 8)
    assert curves.of(3).at(100) == pytest.approx(300)
    assert curves.of(5).at(100) == pytest.approx(500)
    assert curves.of(3) is curves.of(3)


def test_a_surface_is_linear_over_both_its_sides() -> None:
    surface = ChunkSurface(lambda before, tokens: 2.0 * before + 3.0 * tokens, before_grid=64, token_grid=8)
    assert surface.at(100, 37) == pytest.approx(200 + 111)
    assert surface.at(128.0, 5) == pytest.approx(256 + 15)


def test_chunks_curves_begin_small_and_say_the_same_once_they_have_grown() -> None:
    """A forest's look-up costs so much for each value: a chunk of 512 tokens wants 17 of them."""
    asked: list[int] = []

    def evaluate(before: FloatArray, tokens: FloatArray) -> FloatArray:
        asked.append(len(tokens))
        return bent(tokens) + before

    surface = ChunkSurface(evaluate, before_grid=256, token_grid=32)
    first = [surface.at(256, tokens) for tokens in (1, 100, 511, 512)]
    assert asked == [FIRST_CURVES * 18]
    surface.at(256, 5_000)
    assert [surface.at(256, tokens) for tokens in (1, 100, 511, 512)] == first
    assert len(asked) == 2


def test_a_surface_asks_for_many_curves_at_once_each_once() -> None:
    asked: list[float] = []

    def evaluate(before: FloatArray, tokens: FloatArray) -> FloatArray:
        asked.extend(np.unique(before))
        return bent(tokens) * (1.0 + before)

    surface = ChunkSurface(evaluate, before_grid=256, token_grid=32)
    far = 256 * 3 * FIRST_CURVES
    for before in (0, far, 256 * FIRST_CURVES, 256):
        expected = np.interp(100, (96, 128), bent(np.array([96.0, 128.0]))) * (1.0 + before)
        assert surface.at(before, 100) == pytest.approx(expected)
    assert asked == [256.0 * number for number in range(3 * FIRST_CURVES + 1)]
