"""Output lengths in buckets, and how rightly they are told apart (TetriInfer 3.3.2, 5.2.2)."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

GRANULARITIES = (100, 200, 400)
"""Tokens a bucket; those of TetriInfer 5.2.2."""
CONFIDENT = 1.96
"""Standard deviations to either side that hold 95 %."""


def bucket_of(output_tokens: int, granularity: int, max_tokens: int) -> int:
    """Longer outputs than ``max_tokens`` are in the last one."""
    return min(output_tokens, max_tokens) // granularity


def buckets_for(granularity: int, max_tokens: int) -> int:
    """How many buckets there are up to and with ``max_tokens``."""
    return max_tokens // granularity + 1


def commonest(buckets: Sequence[int]) -> int:
    """The one that most are in; the lowest of several."""
    counts = Counter(buckets)
    return min(counts, key=lambda bucket: (-counts[bucket], bucket))


def mean_lengths(lengths: Sequence[int], granularity: int, max_tokens: int) -> tuple[float, ...]:
    """Of every bucket, the mean length in it; its middle where no length was seen in it."""
    sums: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    for length in lengths:
        bucket = bucket_of(length, granularity, max_tokens)
        sums[bucket] += min(length, max_tokens)
        counts[bucket] += 1
    return tuple(
        sums[bucket] / counts[bucket]
        if counts[bucket]
        else min((bucket + 0.5) * granularity, float(max_tokens))
        for bucket in range(buckets_for(granularity, max_tokens))
    )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of prompts that were not learned from: how many there are, the share whose bucket was named, and the
    share that always naming the commonest bucket of the prompts learned from would have. ``gain_error``: the
    first share exceeds the other by their difference give or take this, with 95 % confidence."""

    granularity: int
    prompts: int
    right: float
    commonest: float
    gain_error: float


def accuracy_of(
    granularity: int, truth: Sequence[int], named: Sequence[int], usual: Sequence[int]
) -> Accuracy:
    """``usual``: the commonest bucket, a prompt each."""
    right = [each == other for each, other in zip(truth, named, strict=True)]
    alike = [each == other for each, other in zip(truth, usual, strict=True)]
    # Both are judged by the same prompts: what counts is where they differ.
    gains = [one - other for one, other in zip(right, alike, strict=True)]
    deviation = statistics.pstdev(gains) / math.sqrt(len(gains))
    return Accuracy(
        granularity, len(truth), sum(right) / len(truth), sum(alike) / len(truth), CONFIDENT * deviation
    )
