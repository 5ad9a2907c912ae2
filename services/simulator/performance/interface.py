"""The one interface of all performance models, and how well those that were fitted do what they were not
fitted to."""

from collections.abc import Callable, Mapping
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


@runtime_checkable
class StepTimes(Protocol):
    """A model that is asked for many steps of the same sequences at less than a pass each."""

    def step_s_of(self, sequences: int) -> Callable[[int], float]:
        """A decode step of so many: seconds by the tokens of context of all, the ``pass_s`` of that."""


@runtime_checkable
class OperatorTimes(Protocol):
    """A model that knows what each operator takes (Vidur 5.2). All of a pass's are its ``pass_s``."""

    def row_operators_s(self, rows: int, heads: int) -> Mapping[str, float]:
        """Seconds by operator, without attention, of all layers and stages: a pass of so many tokens, of
        which so many sequences draw one."""

    def chunks_attention_s(self, chunks: tuple[tuple[int, int], ...]) -> float:
        """Of a pass's chunks: (tokens before, tokens) of each."""

    def steps_attention_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Of decode steps, as ``steps_s``."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """``mape``: the mean relative error of samples that were predicted by a fit to others."""

    operator: str
    mape: float
    samples: int

    def __str__(self) -> str:
        return f"{self.operator}: {100 * self.mape:.1f} % off on held-out data ({self.samples:,} samples)"
