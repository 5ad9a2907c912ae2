"""A pass as the sum of its operators: what Vidur's and aiconfigurator's measurements have in common.

Operators over tokens (matrices, norms, collectives) depend on a pass's rows alone; attention on what each row
looks back at. Each is a table over tokens that is made when first needed, so that a pass is a few look-ups.
"""

from typing import Protocol

from services.simulator.performance.curves import BatchCurves, ChunkSurface, TokenCurve
from services.simulator.performance.files import FloatArray
from services.simulator.shape import PassShape

CONTEXT_GRID, CHUNK_GRID, BEFORE_GRID, HEAD_GRID = 32, 32, 256, 4
Chunks = tuple[tuple[int, int], ...]


class Operators(Protocol):
    """Seconds of one pass through all stages, in arrays."""

    @property
    def stages(self) -> int: ...

    def rows_s(self, rows: FloatArray) -> FloatArray:
        """Everything but attention, of passes of so many tokens."""

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

    def __init__(self, operators: Operators, *, row_rounding: int = 1) -> None:
        """``row_rounding``: passes take as long as with the next multiple of so many rows, as matrix kernels
        work in tiles."""
        self._operators = operators
        self._rounding = row_rounding
        self._rows = TokenCurve(operators.rows_s, row_rounding)
        self._heads = TokenCurve(operators.heads_s, HEAD_GRID)
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
            seconds += self._chunks_s(chunks)
        return seconds + self._rows_s(rows) + self._heads.at(sequences + len(chunks))

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        attention_s = self._decode.of(sequences).total(context_tokens / sequences, steps)
        return attention_s + steps * (self._rows_s(sequences) + self._heads.at(sequences))

    def model_s(self, sequences: int) -> float:
        return self._rows_s(sequences) + self._heads.at(sequences)

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        return self._decode.of(sequences).at(context_tokens / sequences)

    def _chunks_s(self, chunks: Chunks) -> float:
        """Attention of all chunks."""
        before, tokens = self._operators.equivalent_chunk(chunks)
        return self._operators.prefill_factor(len(chunks)) * self._prefill.at(before, tokens)

    def _rows_s(self, rows: int) -> float:
        """A pass without rows takes no time."""
        return self._rows.at(-(-rows // self._rounding) * self._rounding) if rows else 0.0
