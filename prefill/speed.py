"""How fast this instance has found that it computes prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.laws import chunk_features, pairs_of
from common.performance import CHUNK_FEATURES, FittedTime, PassLoad
from prefill.events import ChunkSlice
from scheduler.policy.fitting import LinearFit
from scheduler.policy.pass_times import PassTimes

RATE_WEIGHT = 0.2
"""Weight of the newest chunk in the measured rate."""
RATED_SHARE = 0.5
"""Of a full chunk, at least: of fewer tokens' time most is what every chunk costs, whatever its length."""


@dataclass(slots=True)
class PrefillSpeed:
    """``full_chunk_tokens``: of a chunk where enough prompts wait. ``passes``: what the instance has learned
    of those that took decodes along. ``tokens_per_s`` None: no chunk came near a full one."""

    full_chunk_tokens: int
    passes: PassTimes = field(default_factory=PassTimes)
    tokens_per_s: float | None = None
    _chunk_time: LinearFit = field(default_factory=lambda: LinearFit(len(CHUNK_FEATURES)))

    @property
    def chunk_time(self) -> FittedTime | None:
        """By chunks that were computed alone, or, until there were enough of them, by those that were not."""
        return self._chunk_time.fitted or self.passes.chunk_time

    def observe(self, slices: Sequence[ChunkSlice], elapsed_s: float, *, is_alone: bool) -> None:
        """A chunk. A pass that took decodes along does not say by itself what its chunk took."""
        load = load_of(slices)
        tokens = load.chunk_tokens
        if is_alone:
            self._chunk_time.observe(chunk_features(tokens, load.chunk_pairs), elapsed_s)
        if tokens >= RATED_SHARE * self.full_chunk_tokens:
            rate = tokens / max(elapsed_s, 1e-6)
            old = rate if self.tokens_per_s is None else self.tokens_per_s
            self.tokens_per_s = old + RATE_WEIGHT * (rate - old)


def load_of(slices: Sequence[ChunkSlice]) -> PassLoad:
    """What a chunk adds to a pass."""
    return PassLoad(
        chunk_tokens=sum(piece.tokens for piece in slices),
        chunk_pairs=sum(pairs_of(piece.start, piece.tokens) for piece in slices),
    )
