"""What passes that took prompts and decodes together teach of either alone.

A busy instance of mixed role, ``chunked``, computes hardly anything else. A pass takes the sum of what its
chunk's tokens and its sequences cost, and what any pass costs (``common.performance.pass_features``). Passes
of decodes alone are learned from, too: where every chunk just fills what the decodes leave of a pass, only
they tell a chunk's tokens from the sequences beside it. They have a fixed part of their own, so that no law
depends on theirs being the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.performance import PASS_FEATURES, FittedTime, PassLoad, pass_features
from scheduler.policy.fitting import NOVEL, WARM_SAMPLES, LinearFit

FIXED_PART = 2
"""Of a pass's features: what any costs that has a chunk."""
CHUNK_PART, STEP_PART = (0, 1, FIXED_PART), (3, 4, FIXED_PART)
"""Those of ``chunk_features`` and of ``step_features``: alone, either pays for the pass."""
TYPICAL_WEIGHT = 0.05
"""Of the newest shared pass in what is typical of them."""


@dataclass(slots=True)
class PassTimes:
    """An instance's. Nothing is said until ``WARM_SAMPLES`` passes were shared."""

    _fit: LinearFit = field(default_factory=lambda: LinearFit(len(PASS_FEATURES)))
    _shared: int = 0
    _typical: Sequence[float] = (0.0,) * len(PASS_FEATURES)

    def observe(self, load: PassLoad, seconds: float) -> None:
        """Of any pass. Raises ValueError for a time that is none."""
        features = pass_features(load)
        self._fit.observe(features, seconds)
        if load.is_shared:
            self._shared += 1
            weight = max(TYPICAL_WEIGHT, 1 / self._shared)
            pairs = zip(self._typical, features, strict=True)
            self._typical = [old + weight * (new - old) for old, new in pairs]

    @property
    def chunk_time(self) -> FittedTime | None:
        return self._law_of(CHUNK_PART)

    @property
    def step_time(self) -> FittedTime | None:
        return self._law_of(STEP_PART)

    def _law_of(self, part: Collection[int]) -> FittedTime | None:
        """None where passes do not tell this part from the other, and from what any pass costs: so that they
        say nothing of half as much of it alone."""
        alone = [value / 2 if index in part else 0.0 for index, value in enumerate(self._typical)]
        alone[FIXED_PART] = 1.0
        if self._shared < WARM_SAMPLES or self._fit.novelty(alone) > NOVEL:
            return None
        coefficients = tuple(self._fit.coefficients[index] for index in part)
        return FittedTime(coefficients, self._fit.relative_error, self._fit.samples)
