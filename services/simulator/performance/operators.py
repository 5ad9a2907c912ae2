"""A pass as the sum of its operators: what Vidur's and aiconfigurator's measurements have in common.

Operators over tokens (matrices, norms, collectives) depend on a pass's rows alone; attention on what each row
looks back at. Each is a table over tokens that is made when first needed, so that a pass is a few look-ups.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Protocol

import numpy as np

from services.simulator.performance.curves import BatchCurves, ChunkSurface, TokenCurve
from services.simulator.performance.files import FloatArray
from services.simulator.shape import PassShape

CONTEXT_GRID, CHUNK_GRID, BEFORE_GRID, HEAD_GRID = 32, 32, 256, 4
Chunks = tuple[tuple[int, int], ...]
OUTPUT_MATRIX = "output_matrix"


class Operators(Protocol):
    """Seconds of one pass through all stages, in arrays."""

    @property
    def stages(self) -> int: ...

    def row_operators_s(self, rows: FloatArray) -> Mapping[str, FloatArray]:
        """By operator, everything but attention and the output matrix, of passes of so many tokens."""

    def heads_s(self, rows: FloatArray) -> FloatArray:
        """The output matrix, of passes in which so many sequences get a token."""

    def decode_attention_s(self, sequences: int, mean_contexts: FloatArray) -> FloatArray: ...

    def equivalent_chunk(self, chunks: Chunks) -> tuple[float, float]:
        """(tokens before, tokens) of one chunk whose attention takes as long as these."""

    def prefill_attention_s(self, before: FloatArray, tokens: FloatArray) -> FloatArray: ...

    def prefill_factor(self, chunks: int) -> float:
        """Of so many chunks' attention, over that of their equivalent."""


class OperatorModel:
    """The tables of some operators, as a performance model."""

    def __init__(self, operators: Operators, *, row_rounding: int = 1, head_grid: int = HEAD_GRID) -> None:
        """``row_rounding``: passes take as long as with the next multiple of so many rows, as matrix kernels
        work in tiles. ``head_grid``: the output matrix is looked up for every so many sequences."""
        self._operators = operators
        self._rounding = row_rounding
        self._rows = TokenCurve(self._all_rows_s, row_rounding)
        self._each: dict[str, TokenCurve] = {}
        self._heads = TokenCurve(operators.heads_s, head_grid)
        self._decode = BatchCurves(operators.decode_attention_s, CONTEXT_GRID)
        self._prefill = ChunkSurface(
            operators.prefill_attention_s, before_grid=BEFORE_GRID, token_grid=CHUNK_GRID
        )

    @property
    def stages(self) -> int:
        return self._operators.stages

    def pass_s(self, shape: PassShape) -> float:
        sequences, chunks = shape.sequences, shape.chunks
        rows, seconds = sequences, 0.0
        if sequences:
            seconds = self._decode.of(sequences).at(shape.context_tokens / sequences)
        if chunks:
            for _, tokens in chunks:
                rows += tokens
            seconds += self.chunks_attention_s(chunks)
        return seconds + self._rows_s(rows) + self._heads.at(sequences + len(chunks))

    def step_s_of(self, sequences: int) -> Callable[[int], float]:
        attention = self._decode.of(sequences)
        rows_s, head_s = self._rows_s(sequences), self._heads.at(sequences)
        return lambda context_tokens: attention.at(context_tokens / sequences) + rows_s + head_s

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        attention_s = self.steps_attention_s(sequences, context_tokens, steps)
        return attention_s + steps * (self._rows_s(sequences) + self._heads.at(sequences))

    def row_operators_s(self, rows: int, heads: int) -> Mapping[str, float]:
        found = {name: curve.at(self._rounded(rows)) for name, curve in self._row_curves().items()}
        head_s = self._heads.at(heads)
        return {**found, OUTPUT_MATRIX: head_s} if head_s else found

    def chunks_attention_s(self, chunks: Chunks) -> float:
        before, tokens = self._operators.equivalent_chunk(chunks)
        return self._operators.prefill_factor(len(chunks)) * self._prefill.at(before, tokens)

    def steps_attention_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        return self._decode.of(sequences).total(context_tokens / sequences, steps)

    def model_s(self, sequences: int) -> float:
        return self._rows_s(sequences) + self._heads.at(sequences)

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        return self._decode.of(sequences).at(context_tokens / sequences)

    def _all_rows_s(self, rows: FloatArray) -> FloatArray:
        return reduce(np.add, self._operators.row_operators_s(rows).values(), np.zeros(len(rows)))

    def _row_curves(self) -> dict[str, TokenCurve]:
        """Each operator's own, made when first asked for."""
        if not self._each:
            names = self._operators.row_operators_s(np.zeros(1))
            self._each = {name: TokenCurve(partial(self._one_s, name), self._rounding) for name in names}
        return self._each

    def _one_s(self, name: str, rows: FloatArray) -> FloatArray:
        return self._operators.row_operators_s(rows)[name]

    def _rows_s(self, rows: int) -> float:
        """A pass without rows takes no time."""
        return self._rows.at(self._rounded(rows)) if rows else 0.0

    def _rounded(self, rows: int) -> int:
        return -(-rows // self._rounding) * self._rounding
