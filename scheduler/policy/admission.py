"""When a request is turned away at once rather than kept waiting: bounded queues, computed retry times."""

from common.laws import queue_s, step_s
from common.performance import FittedTime

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


def prefill_s(
    tokens: int, chunk_time: FittedTime | None, chunk_tokens: int, tokens_per_s: float | None
) -> float | None:
    """Seconds to compute ``tokens`` of prompt: by what an instance has learned of its chunks, or else by its
    newest rate. None without either."""
    if chunk_time is not None:
        return queue_s(chunk_time, tokens, chunk_tokens)
    return tokens / tokens_per_s if tokens_per_s else None


def next_end_s(
    requests: int, context_tokens: int, coming_tokens: float, step_time: FittedTime | None
) -> float | None:
    """Seconds until the first of so many sequences is expected to end, which are to draw ``coming_tokens`` in
    all. They began at different times, so what each lacks lies anywhere up to twice the mean, and the least
    of it at one part of ``requests + 1``. None where the instance has not measured its steps."""
    if step_time is None or requests == 0:
        return None
    steps = 2 * coming_tokens / requests / (requests + 1)
    return steps * step_s(step_time, requests, context_tokens)


def retry_after_s(excess_s: float | None) -> float:
    """``excess_s``, until there is room, but between 1 and 60 s; None, not known: the lower bound."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, excess_s or 0.0))
