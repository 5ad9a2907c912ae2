"""How many of a trace's requests a run takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.planner.candidates import PoolPlan
from services.planner.probes import Phase, Probe

LEAST_REQUESTS = 400
SOJOURNS = 6.0
"""A sample lasts so many times as long as a request stays."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``requests``: of the whole trace; ``length``: times the shortest sample that shows anything."""

    requests: int
    length: float = 1.0

    def of(
        self, pools: tuple[PoolPlan, ...], sojourn_s: float, phase: Phase = "whole"
    ) -> Callable[[float], Probe]:
        """A probe at a rate."""

        def probe_at(rate_per_s: float) -> Probe:
            wanted = max(LEAST_REQUESTS, math.ceil(SOJOURNS * sojourn_s * rate_per_s))
            requests = min(self.requests, math.ceil(self.length * wanted))
            return Probe(pools=pools, rate_per_s=rate_per_s, requests=requests, phase=phase)

        return probe_at
