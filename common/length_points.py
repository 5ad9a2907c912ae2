"""What the points of a length distribution say (``common.lengths``), and of a request that has drawn some
tokens: placements ask it of every request, and load reports of every sequence again and again."""

from bisect import bisect_left, bisect_right
from math import inf

Points = tuple[tuple[float, float], ...]
"""(tokens, probability), tokens ascending."""


def further(points: Points, tokens: int) -> Points:
    """Those of more than ``tokens``."""
    return points[bisect_right(points, (tokens, inf)) :]


def mean_of(points: Points) -> float:
    return sum([tokens * probability for tokens, probability in points])


def probability_over(points: Points, tokens: float) -> float:
    """The probability of more than that."""
    return sum([probability for each, probability in points if each > tokens])


def beyond_of(points: Points, tokens: int) -> Points:
    """Of those that draw more than ``tokens``; of one more where none is known to."""
    left = further(points, tokens)
    weight = sum([probability for _, probability in left])
    if weight <= 0:
        return ((tokens + 1.0, 1.0),)
    return tuple([(each, probability / weight) for each, probability in left])


def capped_of(points: Points, max_tokens: int) -> Points:
    """Where all end at ``max_tokens`` at the latest."""
    below = points[: bisect_left(points, (max_tokens, -inf))]
    rest = 1.0 - sum([probability for _, probability in below])
    return (*below, (float(max_tokens), rest)) if rest > 1e-12 else below


def outlook_of(points: Points, tokens: int) -> tuple[float, float]:
    """What those draw on average that draw more than ``tokens``, one more where none is known to; and below
    how many it stays the same. As ``LengthDistribution.beyond`` has it, which is not made."""
    left = further(points, tokens)
    weight = sum([probability for _, probability in left], 0.0)
    until = left[0][0] if left else tokens + 1.0
    if weight <= 0:
        return tokens + 1.0, until
    return sum([each * (probability / weight) for each, probability in left], 0.0), until


def coming_tokens(points: Points | None, drawn_tokens: int, max_tokens: int) -> int:
    """That a request which has drawn so many is still expected to, at least one; where it has outlived its
    prediction, as those like it that did. Without a prediction: all that it may."""
    end = None if points is None else round(outlook_of(points, drawn_tokens)[0])
    return tokens_to_come(end, drawn_tokens, max_tokens)


def tokens_to_come(end: int | None, drawn_tokens: int, max_tokens: int) -> int:
    """``coming_tokens`` where those like it draw ``end`` in all; None: nobody knows."""
    left = max_tokens - drawn_tokens
    if end is not None and end - drawn_tokens < left:
        left = end - drawn_tokens
    return left if left > 1 else 1
