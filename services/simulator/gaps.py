"""Gaps between tokens, of all sequences of an instance, at a cost that does not depend on their number."""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import exp, floor, log

RESOLUTION = 1.02
"""A class of gaps is as much wider than the one before."""
LEAST_GAP_S = 1e-6
MOST_KEPT = 64
"""Steps of which it is not asked who still needs them."""


@dataclass(slots=True)
class GapCounts:
    """How often there was which gap (TBT), within 1 %. Its size is bounded by the range of gaps."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, gap_s: float, times: int = 1) -> None:
        place = floor(log(max(gap_s, LEAST_GAP_S)) / LOG_RESOLUTION)
        self.counts[place] = self.counts.get(place, 0) + times

    def merge(self, other: "GapCounts") -> None:
        for place, times in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + times

    def percentiles(self, ranks: tuple[float, ...]) -> list[float]:
        """The middles of the classes in which they lie; empty without any gap."""
        total = sum(self.counts.values())
        if not total:
            return []
        found = []
        for rank in ranks:
            wanted, reached = rank / 100.0 * (total - 1), 0
            for place in sorted(self.counts):
                reached += self.counts[place]
                if reached > wanted:
                    found.append(exp((place + 0.5) * LOG_RESOLUTION))
                    break
        return found


LOG_RESOLUTION = log(RESOLUTION)


@dataclass(slots=True)
class SlowestSteps:
    """The slowest of the steps since any of them: a stack of those that no later one exceeds. ``steps``: how
    many there have been."""

    steps: int = 0
    _numbers: list[int] = field(default_factory=list)
    _gaps_s: list[float] = field(default_factory=list)

    def add(self, steps: int, slowest_s: float) -> None:
        """So many more, and the slowest of them, which counts as the last."""
        self.steps += steps
        while self._gaps_s and self._gaps_s[-1] <= slowest_s:
            self._gaps_s.pop()
            self._numbers.pop()
        self._gaps_s.append(slowest_s)
        self._numbers.append(self.steps)

    @property
    def is_long(self) -> bool:
        """Whether it had better be told what to ``forget``."""
        return len(self._numbers) > MOST_KEPT

    def since(self, step: int) -> float:
        """Of those after the first ``step`` ones; 0 where there is none."""
        place = bisect_right(self._numbers, step)
        return self._gaps_s[place] if place < len(self._gaps_s) else 0.0

    def forget(self, step: int) -> None:
        """Nobody asks of the first ``step`` ones any more."""
        place = bisect_right(self._numbers, step)
        del self._numbers[:place], self._gaps_s[:place]
