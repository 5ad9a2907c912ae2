"""Power of two choices by heaviness (TetriInfer 3.3.4).

Two are drawn by lot, and the one with fewer heavy decodes beside each light one gets a heavy request: so
these are spread evenly without comparing everybody.
"""

MIX = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


def draw_two(count: int, salt: int) -> tuple[int, ...]:
    """Two different places below ``count``, drawn by ``salt``; all there are where those are fewer."""
    if count <= 2:
        return tuple(range(count))
    mixed = _mixed(salt)
    first = mixed % count
    second = (first + 1 + (mixed >> 32) % (count - 1)) % count
    return first, second


def heavy_ratio(heavy: int, light: int) -> float:
    """Heavy decodes beside each light one; one light one is taken for granted."""
    return heavy / (light + 1)


def _mixed(salt: int) -> int:
    """Bits of ``salt``, spread evenly (SplitMix64's finalizer)."""
    word = (salt + MIX) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
