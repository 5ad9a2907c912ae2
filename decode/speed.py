"""How long this instance's decode steps have taken of late."""

RATE_WEIGHT = 0.1
"""Weight of the newest step in the measured step time."""


def smoothed_step_s(known_s: float | None, newest_s: float, steps: int = 1) -> float:
    """``known_s``: before; None: nothing was known. ``steps``: as many in a row took as long."""
    if known_s is None:
        return newest_s
    return newest_s + (1.0 - RATE_WEIGHT) ** steps * (known_s - newest_s)
