"""The one interface of all performance models, and how well those that were fitted do what they were not
fitted to."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from services.simulator.shape import PassShape


class PerformanceModel(Protocol):
    """Pure arithmetic: the same question has the same answer."""

    @property
    def stages(self) -> int:
        """Of the pipeline. A pass takes ``pass_s`` through all of them; the next may follow it after one
        stage's share."""

    def pass_s(self, shape: PassShape) -> float:
        """Seconds of one pass: chunks, a decode step, or both at once."""

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Seconds of ``steps`` decode steps of the same sequences. ``context_tokens``: of the first one; each
        step's is larger by one token a sequence. The sum of ``pass_s``, in constant time."""


@runtime_checkable
class FrontLoaded(Protocol):
    """A model of a pipeline whose first stage does more than its share."""

    def front_s(self, shape: PassShape) -> float:
        """Of a pass's seconds, those that come before all stages' shares."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """``mape``: the mean relative error of samples that were predicted by a fit to others."""

    operator: str
    mape: float
    samples: int

    def __str__(self) -> str:
        return f"{self.operator}: {100 * self.mape:.1f} % off on held-out data ({self.samples:,} samples)"
