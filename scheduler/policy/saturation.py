"""The saturation length: from how many tokens on a chunk keeps the device busy (DistServe 4.3, L_m).

Below it a chunk waits for memory, and prompts should be computed together; above it, nothing is gained but
the next prompt's waiting. TetriInfer's ChunkSize is the same length (3.3.3).
"""

from collections.abc import Mapping

SATURATED = 0.9
"""Share of the best rate of all chunks that were tried."""


def saturation_length(seconds: Mapping[int, float], share: float = SATURATED) -> int:
    """The fewest tokens at which the rate reaches ``share`` of the best. ``seconds``: by a chunk's tokens.
    Raises ValueError without any."""
    if not seconds:
        raise ValueError("no chunk was measured")
    rates = {tokens: tokens / taken for tokens, taken in seconds.items()}
    best = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= share * best)
