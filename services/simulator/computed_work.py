"""What an engine has computed, counted as the cost formulas ask for it (``common.cost``)."""

from collections.abc import Collection
from dataclasses import dataclass

from common.cost import attention_work, model_work
from common.laws import pairs_of
from common.shapes import ModelShape
from services.simulator.shape import attended_tokens

Chunks = Collection[tuple[int, int]]


@dataclass(slots=True)
class ComputedWork:
    """Of an engine since the start. ``passes``: runs of the model, each step one; ``rows``: tokens computed;
    ``heads``: those after which one is drawn; ``pairs``: of a token and one that it attends to;
    ``read_tokens``: whose KV was read."""

    passes: int = 0
    rows: int = 0
    heads: int = 0
    pairs: int = 0
    read_tokens: int = 0

    def add_steps(self, sequences: int, context_tokens: int, steps: int) -> None:
        """Of the same sequences. ``context_tokens``: of the first step."""
        self.add_rows(sequences, steps)
        self.add_attention(sequences, context_tokens, steps)

    def add_rows(self, sequences: int, steps: int) -> None:
        """All but attention."""
        self.passes += steps
        self.rows += steps * sequences
        self.heads += steps * sequences

    def add_attention(self, sequences: int, context_tokens: int, steps: int) -> None:
        attended = attended_tokens(sequences, context_tokens, steps)
        self.pairs += attended
        self.read_tokens += attended

    def add_mixed(self, chunks: Chunks, sequences: int, context_tokens: int) -> None:
        """A pass with chunks: (tokens before, tokens) of each. One of nothing is none."""
        if not chunks and not sequences:
            return
        self.add_steps(sequences, context_tokens, 1)
        for before, tokens in chunks:
            self.rows += tokens
            self.heads += 1
            self.pairs += pairs_of(before, tokens) + tokens
            self.read_tokens += before + tokens

    def flops(self, shape: ModelShape) -> float:
        multiplied = model_work(shape, self.rows, 1).flops
        undrawn = 2.0 * shape.head_parameters * (self.rows - self.heads)
        return multiplied - undrawn + self.pairs * attention_work(shape, 1, 1, 1).flops

    def moved_bytes(self, shape: ModelShape, element_bytes: int) -> float:
        weights, row = (model_work(shape, rows, element_bytes).bytes_moved for rows in (0, 1))
        query, token = (attention_work(shape, 1, each, element_bytes).bytes_moved for each in (0, 1))
        each_row = row - weights + query
        return self.passes * weights + self.rows * each_row + self.read_tokens * (token - query)
