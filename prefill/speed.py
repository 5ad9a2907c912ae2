"""How fast this instance has found that it computes prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.performance import CHUNK_FEATURES, FittedTime, chunk_features, pairs_of
from prefill.events import ChunkSlice
from scheduler.policy.fitting import LinearFit

RATE_WEIGHT = 0.2
"""Weight of the newest chunk in the measured rate."""
RATED_SHARE = 0.5
"""Of a full chunk, at least: of fewer tokens' time most is what every chunk costs, whatever its length."""


@dataclass(slots=True)
class PrefillSpeed:
    """``full_chunk_tokens``: of a chunk where enough prompts wait. ``tokens_per_s`` None: none came near."""

    full_chunk_tokens: int
    tokens_per_s: float | None = None
    _chunk_time: LinearFit = field(default_factory=lambda: LinearFit(len(CHUNK_FEATURES)))

    @property
    def chunk_time(self) -> FittedTime | None:
        return self._chunk_time.fitted

    def observe(self, slices: Sequence[ChunkSlice], elapsed_s: float, *, is_alone: bool) -> None:
        """A chunk. A pass that took decodes along says nothing of what a chunk takes."""
        tokens = sum(piece.tokens for piece in slices)
        if is_alone:
            pairs = sum(pairs_of(piece.start, piece.tokens) for piece in slices)
            self._chunk_time.observe(chunk_features(tokens, pairs), elapsed_s)
        if tokens >= RATED_SHARE * self.full_chunk_tokens:
            rate = tokens / max(elapsed_s, 1e-6)
            old = rate if self.tokens_per_s is None else self.tokens_per_s
            self.tokens_per_s = old + RATE_WEIGHT * (rate - old)
