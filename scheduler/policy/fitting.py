"""Recursive least squares: what an instance learns of its own speed, step by step (Aladdin, section 3).

Old steps are slowly forgotten, so that the fit follows a machine that becomes slower or faster. Where steps
are all alike, nothing tells coefficients apart: then nothing is forgotten either, or the fit would wander. A
step like many before it that took far longer was held up by something else: it counts for as much as errors
that are usual, and no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.performance import FittedTime

FIRST_VARIANCE = 10.0
"""Of coefficients before anything is known: more than any has. With much more, a few cold steps of nearly
one size would seem to say what steps a hundred times as large take."""
FORGETTING = 0.998
"""Weight of a step after the next one: half after some 350."""
MOST_VARIANCE = 1e4
"""With more in all, steps have been too alike to forget any."""
WARM_SAMPLES = 16
"""Before so many, no error is known to be unusual."""
OUTLIER, LEAST_ERROR = 4.0, 0.05
"""Times the usual relative error, which is never taken for less than this."""
NOVEL = 0.1
"""Of a step that is unlike those before: of one like them it is some thousandths."""
ERROR_WEIGHT = 0.05
SURPRISE = 4.0
"""A step that took more than so many times its prediction is not measured by that. One that a wrong fit
predicts to take next to nothing would count for thousands of others, and keep the fit wrong."""
LEAST_S = 1e-6
"""No step is over sooner."""


@dataclass(slots=True)
class LinearFit:
    """Seconds as a sum of ``features`` times coefficients. What is kept small are relative errors: a long
    step's few milliseconds are no reason to be wrong by half about a short one."""

    features: int
    samples: int = 0
    relative_error: float = 0.0
    coefficients: list[float] = field(init=False)
    _variance: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = [0.0] * self.features
        self._variance = [
            [FIRST_VARIANCE * (row == column) for column in range(self.features)]
            for row in range(self.features)
        ]

    @property
    def fitted(self) -> FittedTime | None:
        """None while there are too few samples to say anything."""
        if self.samples < WARM_SAMPLES:
            return None
        return FittedTime(tuple(self.coefficients), self.relative_error, self.samples)

    def novelty(self, features: Sequence[float]) -> float:
        """How little is known of such a step: the variance of what is predicted, over one measurement's. Much
        above 1 where nothing has told the coefficients apart that it needs."""
        x = self._scaled(features, max(LEAST_S, self._predicted_s(features)))
        return sum(map(float.__mul__, self._gains(x), x), 0.0)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Raises ValueError for another number of features, or a time that is none."""
        if len(features) != self.features or not 0 <= seconds < float("inf"):
            raise ValueError(f"{features} took {seconds} s: needs {self.features} features and a time")
        predicted_s = self._predicted_s(features)
        scale_s = max(LEAST_S, seconds)
        if self.samples > WARM_SAMPLES:
            scale_s = max(LEAST_S, predicted_s, seconds / SURPRISE)
        x = self._scaled(features, scale_s)
        error = (seconds - predicted_s) / scale_s
        gains = self._gains(x)
        novelty = sum(map(float.__mul__, gains, x), 0.0)
        bound = OUTLIER * max(self.relative_error, LEAST_ERROR)
        is_held_up = self.samples > WARM_SAMPLES and novelty < NOVEL and abs(error) > bound
        self._note_error(abs(seconds - predicted_s) / max(seconds, LEAST_S), bound)
        self._learn(gains, novelty, bound / abs(error) if is_held_up else 1.0, error)

    def _predicted_s(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, map(float, features)), 0.0)

    def _scaled(self, features: Sequence[float], scale_s: float) -> list[float]:
        return [float(feature) / scale_s for feature in features]

    def _gains(self, x: Sequence[float]) -> list[float]:
        return [sum(map(float.__mul__, row, x), 0.0) for row in self._variance]

    def _learn(self, gains: Sequence[float], novelty: float, trust: float, error: float) -> None:
        variance = sum([row[index] for index, row in enumerate(self._variance)], 0.0)
        keep = 1.0 if variance > MOST_VARIANCE else FORGETTING
        weight = keep / trust + novelty
        for row, gain in enumerate(gains):
            self.coefficients[row] += gain / weight * error
            for column, other in enumerate(gains):
                self._variance[row][column] = (self._variance[row][column] - gain * other / weight) / keep

    def _note_error(self, error: float, bound: float) -> None:
        """The first steps' errors are of a fit that knows nothing, and are not counted."""
        self.samples += 1
        if self.samples > self.features:
            usual = min(error, bound) if self.samples > WARM_SAMPLES else min(error, 1.0)
            weight = max(ERROR_WEIGHT, 1 / (self.samples - self.features))
            self.relative_error += weight * (usual - self.relative_error)
