"""How many tokens a request will draw, as far as anybody can know: the distribution that predictors answer.

Its mean is what is unbiased in Aladdin, 2.3; what a request that has outlived its prediction will draw is the
mean of those that got as far (4.3); TetriInfer calls a request heavy by 128 tokens (5.1).
"""

from bisect import bisect_left
from functools import cached_property
from math import inf

import msgspec

from common.length_points import further

HEAVY_TOKENS = 128


class LengthDistribution(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """``points``: (tokens, probability), tokens ascending, probabilities summing to 1. Never empty.
    ``dict``: what is summed up is kept, as a placement asks for it again and again."""

    points: tuple[tuple[float, float], ...]

    @cached_property
    def mean(self) -> float:
        return sum([tokens * probability for tokens, probability in self.points])

    def quantile(self, share: float) -> float:
        """The least length that at least ``share`` of requests do not exceed."""
        reached = 0.0
        for tokens, probability in self.points:
            reached += probability
            if reached >= share - 1e-9:
                return tokens
        return self.points[-1][0]

    def probability_over(self, tokens: float) -> float:
        return sum([probability for each, probability in self.points if each > tokens])

    @property
    def is_heavy(self) -> bool:
        """Whether it is likelier to be than not."""
        return self.probability_over(HEAVY_TOKENS) > 0.5

    def beyond(self, tokens: int) -> "LengthDistribution":
        """Of those that draw more than ``tokens``; of one more where none is known to."""
        points = further(self.points, tokens)
        weight = sum([probability for _, probability in points])
        if weight <= 0:
            return certain(tokens + 1)
        return LengthDistribution(tuple([(each, probability / weight) for each, probability in points]))


def certain(tokens: int) -> LengthDistribution:
    """Of a length that is known, as a trace's is."""
    return LengthDistribution(((float(tokens), 1.0),))


def capped(lengths: LengthDistribution, max_tokens: int) -> LengthDistribution:
    """Of requests that end at ``max_tokens`` at the latest."""
    below = lengths.points[: bisect_left(lengths.points, (max_tokens, -inf))]
    rest = 1.0 - sum([probability for _, probability in below])
    return LengthDistribution((*below, (float(max_tokens), rest)) if rest > 1e-12 else below)
