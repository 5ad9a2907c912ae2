"""What the simulator asks of a model of performance, whatever it was made from."""

from typing import Protocol

from services.simulator.shape import PassShape


class PerformanceModel(Protocol):
    """One instance's, all of its devices together."""

    def pass_s(self, shape: PassShape) -> float:
        """Seconds of one run of the model: prompt chunks, a decode step, or both."""
        ...

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        """Seconds of so many decode steps of the same sequences, one after another; the context grows by
        ``sequences`` with each, and is ``context_tokens`` in the first."""
        ...
