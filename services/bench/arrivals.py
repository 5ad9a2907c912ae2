"""When requests of an open loop arrive: offsets in seconds from the start of the run, rising, endless.

An open loop's arrivals do not depend on completions: that is what makes a queue visible (Vidur 5 and
DistServe 6.1 both offer Poisson arrivals).
"""

from collections.abc import Iterator

import numpy as np

from common.errors import ConfigError

ARRIVAL_PROCESSES = ("poisson", "fixed")


def fixed_arrivals(rate_per_s: float) -> Iterator[float]:
    """One request every ``1 / rate_per_s``, the first at zero. Counted, not summed: no drift."""
    index = 0
    while True:
        yield index / rate_per_s
        index += 1


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """Exponential gaps of mean ``1 / rate_per_s``; the same for the same seed."""
    generator = np.random.default_rng(seed)
    due_s = 0.0
    while True:
        due_s += float(generator.exponential(1.0 / rate_per_s))
        yield due_s


def make_arrivals(process: str, rate_per_s: float, seed: int) -> Iterator[float]:
    """Arrivals of a named process. ConfigError for an unknown one, or for a rate that is not positive."""
    if not 0.0 < rate_per_s < float("inf"):
        raise ConfigError("--rate", rate_per_s, "must be a positive number of requests per second")
    if process == "poisson":
        return poisson_arrivals(rate_per_s, seed)
    if process == "fixed":
        return fixed_arrivals(rate_per_s)
    raise ConfigError("--arrivals", process, f"must be one of {', '.join(ARRIVAL_PROCESSES)}")
