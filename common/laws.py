"""What the laws say that an instance has learned of its steps (``common.performance``): functions of their
coefficients, which decisions ask for again and again."""

from collections.abc import Sequence
from typing import Protocol

TOKENS, PAIRS = 1e3, 1e6
"""Units of the features: coefficients are then of one size, about a step's seconds."""


class Law(Protocol):
    """Linear in its features: ``common.performance.FittedTime``, whose module asks here."""

    @property
    def coefficients(self) -> tuple[float, ...]: ...


def seconds_of(coefficients: Sequence[float], features: Sequence[float]) -> float:
    """Never under 0: a fit knows nothing of what lies outside what it has seen."""
    pairs = zip(coefficients, features, strict=True)
    return max(0.0, sum([coefficient * feature for coefficient, feature in pairs]))


def chunk_features(tokens: int, pairs: int) -> tuple[float, float, float]:
    """Of a prefill chunk. ``pairs``: over its tokens, how many came before each in its own sequence."""
    return tokens / TOKENS, pairs / PAIRS, 1.0


def pairs_of(start: int, tokens: int) -> int:
    """Of positions ``start``..``start + tokens``: how many positions precede each, summed."""
    return tokens * start + tokens * (tokens - 1) // 2


def step_features(batch: int, context_tokens: int) -> tuple[float, float, float]:
    """Of a decode step over ``context_tokens`` in all."""
    return context_tokens / TOKENS, float(batch), 1.0


def step_s(fitted: Law, batch: int, context_tokens: int) -> float:
    """Seconds of a decode step over ``context_tokens`` in all."""
    return seconds_of(fitted.coefficients, step_features(batch, context_tokens))


def prompt_s(fitted: Law, tokens: int, chunk_tokens: int, computed_tokens: int = 0) -> float:
    """Seconds to compute the rest of a prompt alone, in chunks."""
    rest = max(0, tokens - computed_tokens)
    chunks = -(-rest // chunk_tokens)
    token_part, pair_part, _ = chunk_features(rest, pairs_of(computed_tokens, rest))
    return seconds_of(fitted.coefficients, (token_part, pair_part, float(chunks)))


def queue_s(fitted: Law, tokens: int, chunk_tokens: int) -> float:
    """Seconds to compute ``tokens`` of prompts that wait, in chunks of ``chunk_tokens``, as far as that
    depends on their number alone: how long each of them is, and so its attention over itself, is not known of
    a queue."""
    per_token, _, per_chunk = fitted.coefficients
    return max(0.0, per_token * tokens / TOKENS + per_chunk * -(-tokens // chunk_tokens))


def largest_context(fitted: Law, batch: int, tpot_s: float) -> float:
    """Tokens of context that a batch may have in all for a step of ``tpot_s`` (Aladdin, eq. 4); 0 where the
    batch alone is too slow, infinite where context costs nothing measurable."""
    per_token, per_sequence, base = fitted.coefficients
    left_s = tpot_s - per_sequence * batch - base
    if left_s <= 0:
        return 0.0
    return TOKENS * left_s / per_token if per_token > 0 else float("inf")
