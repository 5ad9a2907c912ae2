"""Recursive least squares: what an instance learns of its own speed, step by step (Aladdin, section 3).

Old steps are slowly forgotten, so that the fit follows a machine that becomes slower or faster. Where steps
are all alike, nothing tells coefficients apart: then nothing is forgotten either, or the fit would wander. A
step like many before it that took far longer was held up by something else: it counts for as much as errors
that are usual, and no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.performance import FittedTime

FIRST_VARIANCE = 1e3
"""Of coefficients before anything is known: much more than any has."""
FORGETTING = 0.998
"""Weight of a step after the next one: half after some 350."""
MOST_VARIANCE = 1e4
"""With more in all, steps have been too alike to forget any."""
WARM_SAMPLES = 16
"""Before so many, no error is known to be unusual."""
OUTLIER, LEAST_ERROR = 4.0, 0.05
"""Times the usual error, which is never taken for less than this share of what was predicted."""
NOVEL = 0.1
"""Of a step that is unlike those before: of one like them it is some thousandths."""
ERROR_WEIGHT = 0.05


@dataclass(slots=True)
class LinearFit:
    """Seconds as a sum of ``features`` times coefficients."""

    features: int
    samples: int = 0
    relative_error: float = 0.0
    coefficients: list[float] = field(init=False)
    _variance: list[list[float]] = field(init=False)
    _usual_error_s: float = 0.0

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

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Raises ValueError for another number of features, or a time that is none."""
        if len(features) != self.features or not 0 <= seconds < float("inf"):
            raise ValueError(f"{features} took {seconds} s: needs {self.features} features and a time")
        x = [float(feature) for feature in features]
        error_s = seconds - sum(map(float.__mul__, self.coefficients, x))
        gains = [sum(map(float.__mul__, row, x)) for row in self._variance]
        novelty = sum(map(float.__mul__, gains, x))
        bound_s = OUTLIER * max(self._usual_error_s, LEAST_ERROR * (seconds - error_s))
        trust = 1.0
        if self.samples > WARM_SAMPLES and novelty < NOVEL and abs(error_s) > bound_s:
            trust = bound_s / abs(error_s)
        self._note_error(error_s, seconds)
        self._learn(gains, novelty, trust, error_s)

    def _learn(self, gains: Sequence[float], novelty: float, trust: float, error_s: float) -> None:
        if trust == 0.0:
            return
        variance = sum(row[index] for index, row in enumerate(self._variance))
        keep = 1.0 if variance > MOST_VARIANCE else FORGETTING
        weight = keep / trust + novelty
        for row, gain in enumerate(gains):
            self.coefficients[row] += gain / weight * error_s
            for column, other in enumerate(gains):
                self._variance[row][column] = (self._variance[row][column] - gain * other / weight) / keep

    def _note_error(self, error_s: float, seconds: float) -> None:
        """The first steps' errors are of a fit that knows nothing, and are not counted."""
        self.samples += 1
        if self.samples <= self.features:
            return
        bound_s = OUTLIER * self._usual_error_s
        usual_s = abs(error_s) if self.samples <= WARM_SAMPLES else min(abs(error_s), bound_s)
        weight = max(ERROR_WEIGHT, 1 / (self.samples - self.features))
        self._usual_error_s += weight * (usual_s - self._usual_error_s)
        self.relative_error += weight * (abs(error_s) / max(seconds, 1e-9) - self.relative_error)
