"""One forward pass, as the rooms order it: a flat ragged batch of sequences, in values only.

A prefill chunk and a decode step are the same thing here. A ``Runner`` computes it: the model
(``common.model.runner``), or a cost model (``common.emulation``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the token that follows. Its output position is ``len(output_ids)``."""

    sampling: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """``token_ids`` go to positions ``start``, ``start + 1``, …; earlier positions are in the KV pool.

    ``block_table`` covers all of them. ``draw`` is None where the prompt goes on in a later chunk. ``key``:
    see ``SequenceChunk``.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    draw: Draw | None
    key: int = 0


@dataclass(frozen=True, slots=True)
class LayerReports:
    """``tell`` is called on the engine's thread, in the course of a step, after ``every`` so many layers: the
    number of the first layers that have the batch's K and V in the pool, where others may read them."""

    every: int
    tell: Callable[[int], None]

    def are_due(self, layers: int) -> bool:
        return layers % self.every == 0


class Runner(Protocol):
    """Computes steps, one at a time, on the engine's thread."""

    def run(
        self, batch: Sequence[SequenceStep], reports: LayerReports | None = None
    ) -> list[SampledToken | None]:
        """The drawn tokens, in the batch's order; None where none was asked for, or its KV was lost."""
        ...
