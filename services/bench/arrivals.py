"""When requests of an open loop arrive: offsets in seconds from the start of the run, rising, endless.

An open loop's arrivals do not depend on completions: that is what makes a queue visible (Vidur 5 and
DistServe 6.1 both offer Poisson arrivals).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from common.errors import ConfigError

ARRIVAL_PROCESSES = ("poisson", "fixed")
POISSON_BURSTINESS = 1.0
MOST_AT_ONCE = 0.2
"""Of gaps that are none. Where ticks are a quarter of the mean gap it is an eighth, and gaps deviate as they
did to within some per cent."""


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


def gamma_arrivals(rate_per_s: float, seed: int, burstiness: float) -> Iterator[float]:
    """Gaps of mean ``1 / rate_per_s`` and of a gamma distribution with the shape ``burstiness``, as vLLM's
    benchmark has it: they deviate by ``1 / sqrt(burstiness)`` times their mean, 1 is Poisson's. Several may
    come at once."""
    generator = np.random.default_rng(seed)
    due_s, scale_s = 0.0, 1.0 / (rate_per_s * burstiness)
    while True:
        due_s += float(generator.gamma(burstiness, scale_s))
        yield due_s


def make_arrivals(
    process: str, rate_per_s: float, seed: int, burstiness: float = POISSON_BURSTINESS
) -> Iterator[float]:
    """Arrivals of a named process. ConfigError for an unknown one, for a rate that is not positive, and as
    ``check_burstiness``."""
    if not 0.0 < rate_per_s < float("inf"):
        raise ConfigError("--rate", rate_per_s, "must be a positive number of requests per second")
    check_burstiness(burstiness, process)
    if process == "poisson" and burstiness != POISSON_BURSTINESS:
        return gamma_arrivals(rate_per_s, seed, burstiness)
    if process == "poisson":
        return poisson_arrivals(rate_per_s, seed)
    if process == "fixed":
        return fixed_arrivals(rate_per_s)
    raise ConfigError("--arrivals", process, f"must be one of {', '.join(ARRIVAL_PROCESSES)}")


def check_burstiness(burstiness: float, process: str) -> None:
    """Raises ConfigError."""
    if not 0.0 < burstiness < float("inf"):
        raise ConfigError("--burstiness", burstiness, "must be over 0; 1 is Poisson's, less is more bursty")
    if burstiness != POISSON_BURSTINESS and process == "fixed":
        raise ConfigError("--burstiness", burstiness, "is of gaps that are drawn: leave --arrivals fixed out")


def burstiness_of(arrivals_s: Sequence[float]) -> float | None:
    """Of arrivals in their order, by their gaps' mean and deviation; None of fewer than three, where all gaps
    are equal, and where so many come at once that these are ticks of a clock that is too coarse to tell."""
    if len(arrivals_s) < 3:
        return None
    gaps_s = np.diff(np.asarray(arrivals_s))
    mean_s, variance = float(gaps_s.mean()), float(gaps_s.var())
    if not variance > 0 or float((gaps_s == 0).mean()) > MOST_AT_ONCE:
        return None
    return mean_s**2 / variance
