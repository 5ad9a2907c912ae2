"""When a request is turned away at once rather than kept waiting: bounded queues, computed retry times."""

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


def retry_after_s(excess_tokens: int, tokens_per_s: float | None) -> float:
    """Seconds until ``excess_tokens`` of prompt will have been computed, between 1 and 60.

    Without a measured rate there is nothing to compute from: the lower bound.
    """
    if tokens_per_s is None or tokens_per_s <= 0:
        return MIN_RETRY_S
    return min(MAX_RETRY_S, max(MIN_RETRY_S, excess_tokens / tokens_per_s))
