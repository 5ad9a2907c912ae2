"""How many tokens a request will draw, as far as anybody can know: the distribution that predictors answer.

Its mean is what is unbiased in Aladdin, 2.3; what a request that has outlived its prediction will draw is the
mean of those that got as far (4.3); TetriInfer calls a request heavy by 128 tokens (5.1).
"""

from functools import cached_property

import msgspec

from common.length_points import beyond_of, capped_of, mean_of, probability_over

HEAVY_TOKENS = 128


class LengthDistribution(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """``points``: (tokens, probability), tokens ascending, probabilities summing to 1. Never empty.
    ``dict``: what is summed up is kept, as a placement asks for it again and again."""

    points: tuple[tuple[float, float], ...]

    @cached_property
    def mean(self) -> float:
        return mean_of(self.points)

    def quantile(self, share: float) -> float:
        """The least length that at least ``share`` of requests do not exceed."""
        reached = 0.0
        for tokens, probability in self.points:
            reached += probability
            if reached >= share - 1e-9:
                return tokens
        return self.points[-1][0]

    def probability_over(self, tokens: float) -> float:
        return probability_over(self.points, tokens)

    @property
    def is_heavy(self) -> bool:
        """Whether it is likelier to be than not."""
        return self.probability_over(HEAVY_TOKENS) > 0.5

    def beyond(self, tokens: int) -> "LengthDistribution":
        """Of those that draw more than ``tokens``; of one more where none is known to."""
        return LengthDistribution(beyond_of(self.points, tokens))


def certain(tokens: int) -> LengthDistribution:
    """Of a length that is known, as a trace's is."""
    return LengthDistribution(((float(tokens), 1.0),))


def capped(lengths: LengthDistribution, max_tokens: int) -> LengthDistribution:
    """Of requests that end at ``max_tokens`` at the latest."""
    return LengthDistribution(capped_of(lengths.points, max_tokens))
