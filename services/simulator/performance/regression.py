"""What operators take, learned from samples: piece-wise linear or a random forest, behind one interface.

Piece-wise linear is numpy's alone and goes on beyond what was measured. The forest is Vidur's (4.4), with its
hyper-parameters, and needs scikit-learn (the extra ``planner``). A forest knows nothing beyond its samples:
it would say the same of a context twice as long. There it goes on as the piece-wise linear does, from its own
value at the edge.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from common.errors import ConfigError
from services.simulator.performance.files import FloatArray
from services.simulator.performance.interface import HeldOutError

Regression = Literal["linear", "forest"]
FOLDS = 10
"""Vidur's."""
TREES, DEPTH, LEAST_SPLIT = 250, 32, 2
"""Of Vidur's grid, one combination."""
SEED = 0
LEAST_VALUE = 1e-12
"""Of what a forest's edge is divided by."""


class Regressor(Protocol):
    def predict(self, features: FloatArray) -> FloatArray:
        """One value for each row of ``features``."""


@dataclass(frozen=True, slots=True)
class Samples:
    """``features``: a row a sample, one or two columns. Of two, the first is the key: a batch's size or a
    chunk's tokens, over which the second, the context, is a curve. ``key_power``: with which power of the key
    values grow (an attention over itself: 2), between and beyond the keys measured. ``slope_power``: with
    which the curves' slopes do."""

    operator: str
    features: FloatArray
    values: FloatArray
    key_power: float = 1.0
    slope_power: float = 1.0

    def take(self, kept: "np.typing.NDArray[np.bool_]") -> "Samples":
        features, values = self.features[kept], self.values[kept]
        return Samples(self.operator, features, values, self.key_power, self.slope_power)


class Line:
    """Through the medians of equal x. Beyond the ends it goes on as its outer half does on average, as the
    last two points alone may be noise; a single point's line has ``slope``."""

    def __init__(self, x: FloatArray, y: FloatArray, slope: float = 0.0) -> None:
        self.x, self.y = medians(x, y)
        self.low_slope = self.high_slope = slope
        if len(self.x) > 1:
            middle = len(self.x) // 2
            self.low_slope = _secant(self.x, self.y, 0, middle)
            self.high_slope = _secant(self.x, self.y, min(middle, len(self.x) - 2), len(self.x) - 1)

    @property
    def is_point(self) -> bool:
        return len(self.x) == 1

    def at(self, x: FloatArray) -> FloatArray:
        inside: FloatArray = np.interp(x, self.x, self.y)
        below, above = np.minimum(0.0, x - self.x[0]), np.maximum(0.0, x - self.x[-1])
        beyond: FloatArray = below * self.low_slope + above * self.high_slope
        return inside + beyond


class LinearRegressor:
    """One column: a line through all. Two: a line over the second column for each value of the first, and
    between two of them linear in the first, raised to ``key_power``."""

    def __init__(self, samples: Samples) -> None:
        self._power = samples.key_power
        if samples.features.shape[1] == 1:
            self._keys = np.zeros(1)
            self._lines = [Line(samples.features[:, 0], samples.values)]
            return
        keys = samples.features[:, 0]
        self._keys = np.unique(keys)
        lines = []
        for key in self._keys:
            rows = keys == key
            lines.append(Line(samples.features[rows, 1], samples.values[rows]))
        self._lines = _with_slopes(self._keys, lines, samples)

    def predict(self, features: FloatArray) -> FloatArray:
        if features.shape[1] == 1:
            return self._lines[0].at(features[:, 0])
        keys, x = features[:, 0], features[:, 1]
        if len(self._keys) == 1:
            return self._lines[0].at(x)
        low, high = self._neighbours(keys)
        scaled = self._keys**self._power
        share = (keys**self._power - scaled[low]) / (scaled[high] - scaled[low])
        return (1 - share) * self._on_lines(low, x) + share * self._on_lines(high, x)

    def _neighbours(self, keys: FloatArray) -> tuple["np.typing.NDArray[np.intp]", ...]:
        """The keys around each; for those above all the middle and the last."""
        last = len(self._keys) - 1
        high = np.clip(np.searchsorted(self._keys, keys), 1, last)
        low = np.where(keys > self._keys[-1], min(len(self._keys) // 2, last - 1), high - 1)
        return low, high

    def _on_lines(self, lines: "np.typing.NDArray[np.intp]", x: FloatArray) -> FloatArray:
        values = np.empty(len(x))
        for index in np.unique(lines):
            rows = lines == index
            values[rows] = self._lines[index].at(x[rows])
        return values


class ForestRegressor:
    def __init__(self, samples: Samples, trees: int = TREES) -> None:
        try:
            from sklearn.ensemble import RandomForestRegressor
        except ImportError as exc:
            rule = "needs scikit-learn: install lamella's extra `planner`"
            raise ConfigError("regression", "forest", rule) from exc
        self._forest = RandomForestRegressor(
            n_estimators=trees, max_depth=DEPTH, min_samples_split=LEAST_SPLIT, random_state=SEED
        )
        self._powers = np.array([samples.key_power, 1.0][-samples.features.shape[1] :])
        self._forest.fit(samples.features**self._powers, samples.values)
        self._beyond = LinearRegressor(samples)
        self._low, self._high = samples.features.min(axis=0), samples.features.max(axis=0)

    def predict(self, features: FloatArray) -> FloatArray:
        inside = np.clip(features, self._low, self._high)
        values = np.asarray(self._forest.predict(inside**self._powers), dtype=np.float64)
        is_beyond = (inside != features).any(axis=1)
        if is_beyond.any():
            edge = np.maximum(LEAST_VALUE, self._beyond.predict(inside[is_beyond]))
            values[is_beyond] *= np.maximum(0.0, self._beyond.predict(features[is_beyond])) / edge
        return values


def medians(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Each x, and the median of its y."""
    order = np.lexsort((y, x))
    each, first, count = np.unique(x[order], return_index=True, return_counts=True)
    low, high = first + (count - 1) // 2, first + count // 2
    return each, (y[order][low] + y[order][high]) / 2


def fit(regression: Regression, samples: Samples) -> Regressor:
    """Raises ConfigError for a forest without scikit-learn."""
    return LinearRegressor(samples) if regression == "linear" else ForestRegressor(samples)


def held_out_error(
    samples: Samples, make: Callable[[Samples], Regressor], folds: int = FOLDS, seed: int = SEED
) -> HeldOutError:
    """Each sample is predicted by a fit to the other folds'. Those of no time at all have no relative
    error."""
    count = len(samples.values)
    fold_of = np.random.default_rng(seed).permutation(count) % min(folds, count)
    predicted = np.empty(count)
    for fold in range(fold_of.max() + 1):
        held = fold_of == fold
        predicted[held] = make(samples.take(~held)).predict(samples.features[held])
    is_time = samples.values > 0
    errors = np.abs(predicted - samples.values)[is_time] / samples.values[is_time]
    return HeldOutError(samples.operator, float(errors.mean()) if len(errors) else math.nan, len(errors))


def held_out_errors(
    each_samples: Iterable[Samples], regression: Regression, folds: int = FOLDS
) -> tuple[HeldOutError, ...]:
    return tuple(held_out_error(each, lambda some: fit(regression, some), folds) for each in each_samples)


def _with_slopes(keys: FloatArray, lines: list[Line], samples: Samples) -> list[Line]:
    """Gives those of one point the slope of the nearest of more, in proportion to the keys."""
    sloped = [index for index, line in enumerate(lines) if not line.is_point]
    if not sloped:
        return lines
    for index, line in enumerate(lines):
        if line.is_point:
            nearest = min(sloped, key=lambda other: abs(keys[other] - keys[index]))
            ratio = (keys[index] / keys[nearest]) ** samples.slope_power
            lines[index] = Line(line.x, line.y, lines[nearest].high_slope * ratio)
    return lines


def _secant(x: FloatArray, y: FloatArray, first: int, last: int) -> float:
    return float((y[last] - y[first]) / (x[last] - x[first]))
