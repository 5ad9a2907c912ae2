"""What one run of the model computes, as performance models ask."""

import msgspec

from common.laws import pairs_of
from common.performance import PassLoad


class PassShape(msgspec.Struct, frozen=True, gc=False):
    """``chunks``: (tokens of the same prompt before it, tokens) of every prompt chunk. ``context_tokens``:
    what all ``sequences`` that are decoded attend to, the token that is computed included. ``ended``: prompts
    whose last chunk is among them.

    A Struct, though no message: one is made for each pass, and these are made in a tenth of the time.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    sequences: int = 0
    context_tokens: int = 0
    ended: int = 0

    @property
    def chunk_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)

    @property
    def tokens(self) -> int:
        """Rows of the model's matrices: of chunks, and one of each sequence."""
        return self.chunk_tokens + self.sequences

    @property
    def load(self) -> PassLoad:
        """As instances learn from it."""
        pairs = sum(pairs_of(before, tokens) for before, tokens in self.chunks)
        return PassLoad(self.chunk_tokens, pairs, self.sequences, self.context_tokens)


def attended_tokens(sequences: int, context_tokens: int, steps: int) -> int:
    """In all of so many decode steps of the same sequences. ``context_tokens``: of the first; each further
    one's is larger by one token a sequence."""
    return steps * context_tokens + sequences * steps * (steps - 1) // 2
