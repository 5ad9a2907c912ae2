"""Regressions: between samples, beyond them, held out; both kinds behind one interface."""

import numpy as np
import pytest

from services.simulator.performance.files import FloatArray
from services.simulator.performance.regression import (
    ForestRegressor,
    LinearRegressor,
    Regression,
    Samples,
    fit,
    held_out_error,
)


def grid(keys: FloatArray, contexts: FloatArray) -> FloatArray:
    return np.array([(key, context) for key in keys for context in contexts])


KEYS, CONTEXTS = np.array([1.0, 2, 4, 8, 16, 32]), np.arange(0.0, 4096, 128)


def attention(features: FloatArray) -> FloatArray:
    return np.asarray(0.01 + 1e-5 * features[:, 0] * features[:, 1], dtype=np.float64)


def samples_of_attention() -> Samples:
    features = grid(KEYS, CONTEXTS)
    return Samples("attention", features, attention(features))


def test_lines_are_exact_where_the_truth_is_linear_within_and_beyond() -> None:
    fitted = LinearRegressor(samples_of_attention())
    asked = np.array([[3.0, 100.0], [8, 64], [8, 9000], [50, 1000], [64, 8000]])
    assert fitted.predict(asked) == pytest.approx(attention(asked))


def test_equal_features_count_by_their_median() -> None:
    fitted = LinearRegressor(Samples("x", np.array([[1.0], [1], [1], [2]]), np.array([1.0, 9, 2, 4])))
    assert fitted.predict(np.array([[1.0], [1.5]])).tolist() == [2, 3]


def test_a_key_with_one_sample_takes_the_slope_of_the_nearest_in_proportion() -> None:
    features = np.array([[1.0, 0], [1, 100], [10, 50]])
    fitted = LinearRegressor(Samples("step", features, np.array([1.0, 2, 20])))
    assert fitted.predict(np.array([[10.0, 50], [10, 150]])) == pytest.approx([20, 30])


def test_between_keys_values_follow_the_power_that_is_said() -> None:
    features = np.array([[100.0, 0], [200, 0]])
    fitted = LinearRegressor(Samples("prompt", features, np.array([1.0, 4]), key_power=2.0))
    assert fitted.predict(np.array([[150.0, 0], [300, 0]])) == pytest.approx([2.25, 9])


@pytest.mark.parametrize("regression", ["linear", "forest"])
def test_held_out_samples_are_predicted_by_fits_to_the_others(regression: Regression) -> None:
    error = held_out_error(samples_of_attention(), lambda some: make(regression, some), folds=4)
    assert error.samples == len(KEYS) * len(CONTEXTS)
    assert 0 <= error.mape < (0.001 if regression == "linear" else 0.2)
    noisy = Samples("noise", np.arange(40.0)[:, None], np.where(np.arange(40) % 2, 1.0, 3.0))
    assert held_out_error(noisy, lambda some: make(regression, some)).mape > 0.3
    assert f"{error}".startswith("attention: ")


def test_a_forest_is_deterministic_and_goes_on_beyond_its_samples_as_lines_do() -> None:
    pytest.importorskip("sklearn")
    samples = samples_of_attention()
    one, other = (ForestRegressor(samples, trees=12) for _ in range(2))
    inside, beyond = np.array([[8.0, 1000.0]]), np.array([[8.0, 3968.0 * 2]])
    assert one.predict(inside) == pytest.approx(other.predict(inside), rel=0, abs=0)
    assert one.predict(inside) == pytest.approx(attention(inside), rel=0.1)
    assert one.predict(beyond) == pytest.approx(attention(beyond), rel=0.1)


def test_fit_makes_what_is_asked_for() -> None:
    assert isinstance(fit("linear", samples_of_attention()), LinearRegressor)
    pytest.importorskip("sklearn")
    assert isinstance(fit("forest", samples_of_attention().take(np.arange(192) % 8 == 0)), ForestRegressor)


def make(regression: Regression, samples: Samples) -> LinearRegressor | ForestRegressor:
    if regression == "linear":
        return LinearRegressor(samples)
    pytest.importorskip("sklearn")
    return ForestRegressor(samples, trees=12)
