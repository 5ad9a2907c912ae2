"""At which rate a workload comes: as the comparison says, or at a share of what a mesh serves of it on this
machine, so that a comparison means the same on every machine.

Capacity is found by simulation: the highest rate at which nine in ten of some requests, which no round has,
meet their objectives and nothing piles up. Of workloads that something is fitted to it is found by the
profile alone, as they come first; of others with what their runs said that a mesh takes beside its model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.errors import ConfigError
from services.compare.comparison import Candidate, Comparison, Offer
from services.compare.records import RunRecord, keep, read_kept
from services.compare.simulated import Simulation
from services.compare.simulated_mesh import Overhead
from services.planner.goodput import FINE, Capacity, find_capacity, served_by
from services.planner.probes import Point, Probe, Search
from services.planner.simulating import point_of
from services.simulator.metrics import measure

GOAL = 0.9
CAPACITY_ROUND = 20_000
"""Its seed is no measured round's."""
DIGITS = 3
"""That a rate is rounded to."""


class FoundRate(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``rates.jsonl``: at which a configuration's runs of a workload come, in all rounds."""

    fingerprint: str
    configuration: str
    workload: str
    capacity_per_s: float
    rate_per_s: float


@dataclass(slots=True)
class Rates:
    """``path``: of the file that keeps what was found. ``tell``: who is told of it."""

    comparison: Comparison
    path: Path
    tell: Callable[[str], None]
    _found: dict[tuple[str, str], float] = field(init=False)
    _overheads: dict[str, Overhead] = field(default_factory=dict)
    _capacities: dict[tuple[str, bool, str, float, float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = read_kept(self.path, FoundRate, self.comparison)
        self._found = {(each.configuration, each.workload): each.rate_per_s for each in found}

    def known_rate(self, candidate: Candidate, offer: Offer) -> float | None:
        """None: it is still to be found."""
        given = candidate.given_rate(offer)
        return self._found.get((candidate.name, offer.name)) if given is None else given

    def rate_per_s(self, candidate: Candidate, offer: Offer, records: Sequence[RunRecord]) -> float:
        """``records``: all runs so far. Raises ConfigError for a mesh that serves none of it, or that was not
        run at what its costs are fitted to."""
        known = self.known_rate(candidate, offer)
        if known is not None:
            return known
        assert offer.capacity_share is not None, "a workload has a rate or a share"
        capacity_per_s = self._capacity(candidate, offer, records)
        rate_per_s = float(f"{offer.capacity_share * capacity_per_s:.{DIGITS}g}")
        found = FoundRate(
            fingerprint=self.comparison.fingerprint,
            configuration=candidate.name,
            workload=offer.name,
            capacity_per_s=capacity_per_s,
            rate_per_s=rate_per_s,
        )
        keep(self.path, found)
        self._found[candidate.name, offer.name] = rate_per_s
        self.tell(
            f"{candidate.name} serves {capacity_per_s:.3g} requests/s of {offer.drawn_from} by simulation:"
            f" {offer.name} comes at {rate_per_s:g}/s, for {offer.requests / rate_per_s:.0f} s"
        )
        return rate_per_s

    def _capacity(self, candidate: Candidate, offer: Offer, records: Sequence[RunRecord]) -> float:
        is_bare = offer.name in self.comparison.fitted or not self.comparison.calibration
        key = candidate.name, is_bare, offer.drawn_from, offer.ttft_s, offer.tpot_s
        if key not in self._capacities:
            self.tell(f"{candidate.name}: looking for what it serves of {offer.drawn_from}, by simulation")
            overhead = Overhead() if is_bare else self._overhead(candidate, records)
            self._capacities[key] = capacity_of(self.comparison, candidate, offer, overhead)
        return self._capacities[key]

    def _overhead(self, candidate: Candidate, records: Sequence[RunRecord]) -> Overhead:
        if candidate.name not in self._overheads:
            self._overheads[candidate.name] = Simulation(self.comparison).calibrate(candidate, records)
        return self._overheads[candidate.name]


def capacity_of(comparison: Comparison, candidate: Candidate, offer: Offer, overhead: Overhead) -> float:
    """Requests a second, whatever rate the offer has. Raises ConfigError where there is none."""
    many = msgspec.structs.replace(offer, requests=comparison.capacity_requests)
    simulation = Simulation(comparison)

    def probe_at(rate_per_s: float) -> Probe:
        return Probe(pools=(), rate_per_s=rate_per_s, requests=many.requests)

    def run(probe: Probe) -> Point:
        cluster = simulation.simulate(candidate, many, probe.rate_per_s, CAPACITY_ROUND, overhead)
        return point_of(cluster, measure(cluster, offer.objectives), 0)

    found = _driven(find_capacity(probe_at, served_by(GOAL), math.inf, tolerance=FINE), run).rate_per_s
    if not found:
        rule = (
            f"is of nothing: by simulation {candidate.name} serves none of {offer.name} within its objectives"
        )
        raise ConfigError("workload.capacity_share", offer.capacity_share, rule)
    return found


def _driven(search: Search[Capacity], run: Callable[[Probe], Point]) -> Capacity:
    points: dict[Probe, Point] | None = None
    while True:
        try:
            [probe] = next(search) if points is None else search.send(points)
        except StopIteration as end:
            found: Capacity = end.value
            return found
        points = {probe: run(probe)}
