"""How an instance fares, whichever life of it is there: how slow it is, how fast its links are, whether it is
heard."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from services.simulator.performance.interface import PerformanceModel
from services.simulator.shape import PassShape


@dataclass(slots=True)
class Conditions:
    """Of what befalls it at the same time every part counts. ``silences``: how many there are."""

    times_slower: list[float] = field(default_factory=list)
    link_shares: list[float] = field(default_factory=list)
    silences: int = 0

    def end_silence(self) -> None:
        self.silences -= 1

    @property
    def slowness(self) -> float:
        return math.prod(self.times_slower)

    @property
    def link_share(self) -> float:
        return math.prod(self.link_shares)


class Fares(NamedTuple):
    """How an attention worker does: it takes ``slowness`` times as long, over so much of its link."""

    slowness: float = 1.0
    link_share: float = 1.0


FINE = Fares()


@dataclass(frozen=True, slots=True)
class SlowedPerformance:
    """Of a device on which everything takes ``times`` as long."""

    model: PerformanceModel
    times: float

    @property
    def stages(self) -> int:
        return self.model.stages

    def pass_s(self, shape: PassShape) -> float:
        return self.times * self.model.pass_s(shape)

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        return self.times * self.model.steps_s(sequences, context_tokens, steps)
