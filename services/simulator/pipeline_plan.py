"""Which passes follow on one another in a pipeline that computes decodes alone, until a batch changes.

Passes stay in order, and of each batch one is under way at a time: so batches begin in the order in which
they ended, each as soon as it has and the first stage is free. That is worked out some rounds at a time: a
plan that is cut soon has not cost much.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST_ROUNDS = 4
"""Of all batches; then twice as many each time."""
MOST_ROUNDS = 256


class Planned(NamedTuple):
    """A pass. ``stages``: (begin, end) of each; ``context_tokens``: of its ``sequences``."""

    lane: int
    stages: tuple[tuple[float, float], ...]
    duration_s: float
    sequences: int
    context_tokens: int

    @property
    def begin_s(self) -> float:
        return self.stages[0][0]

    @property
    def end_s(self) -> float:
        return self.stages[-1][1]


@dataclass(slots=True)
class Told:
    """Of one lane, steps that have ended: the first and the last of them, what all of them took, and the most
    from one's end to the next one's."""

    first: Planned
    last: Planned
    duration_s: float
    steps: int = 1
    slowest_s: float = 0.0

    @property
    def lane(self) -> int:
        return self.first.lane

    def add(self, step: Planned) -> None:
        self.slowest_s = max(self.slowest_s, step.end_s - self.last.end_s)
        self.last, self.steps = step, self.steps + 1
        self.duration_s += step.duration_s


class Ended(NamedTuple):
    """Of one lane: how many steps have, and the last of them."""

    steps: int
    last: Planned


@dataclass(slots=True)
class PipelinePlan:
    """``passes``: those that had begun when it was made, and those that follow. ``waiting``: lanes that are
    ready, and since when. ``left``: how many steps of each lane end until it may change, from the first of
    ``passes`` on. ``begin``: a lane's next pass at that time. ``over_s``: when the first lane may change,
    once that is known. ``ended``: of those that were taken, since it was made."""

    passes: deque[Planned]
    waiting: deque[tuple[int, float]]
    left: dict[int, int]
    begin: Callable[[int, float], Planned]
    free_s: float
    rounds: int = FIRST_ROUNDS
    over_s: float | None = None
    ended: dict[int, Ended] = field(default_factory=dict)
    _ending: deque[Planned] = field(init=False)
    _steps: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._ending = deque(self.passes)
        self._steps = dict(self.left)

    def extend(self) -> float:
        """Some rounds more; until when it goes: the change, or the last begin, or the end after which nobody
        has looked whether the lane changes, if a later pass is in the first stage for longer."""
        room = self.rounds * len(self.left)
        self.rounds = min(2 * self.rounds, MOST_ROUNDS)
        while self.over_s is None and room > 0:
            if self.waiting:
                lane, ready_s = self.waiting.popleft()
                begun = self.begin(lane, max(ready_s, self.free_s))
                self.free_s = begun.stages[0][1]
                self.passes.append(begun)
                self._ending.append(begun)
                room -= 1
                continue
            ended = self._ending.popleft()
            self.left[ended.lane] -= 1
            if self.left[ended.lane] == 0:
                self.over_s = ended.end_s
            else:
                self.waiting.append((ended.lane, ended.end_s))
        return min(self.passes[-1].begin_s, self._ending[0].end_s) if self.over_s is None else self.over_s

    @property
    def most_steps(self) -> int:
        """Of a lane, until it may change."""
        return max(self._steps.values())

    def goes_on(self, now: float) -> bool:
        """Whether it is known that no lane has changed by then."""
        return now < (self._ending[0].end_s if self.over_s is None else self.over_s)

    def is_over(self, lane: int) -> bool:
        """Whether it may be another one now."""
        return self.ended[lane].steps >= self._steps[lane]

    def take_ended(self, now: float) -> list[Told]:
        """By now: each lane's at once, in the order of their last ends. They are among ``passes`` no more."""
        found: dict[int, Told] = {}
        while self.passes and self.passes[0].end_s <= now:
            step = self.passes.popleft()
            told = found.get(step.lane)
            if told is None:
                found[step.lane] = Told(step, step, step.duration_s)
            else:
                told.add(step)
        for lane, told in found.items():
            self.ended[lane] = Ended(told.steps + self.steps_ended(lane), told.last)
        return sorted(found.values(), key=lambda told: told.last.end_s)

    def steps_ended(self, lane: int) -> int:
        ended = self.ended.get(lane)
        return 0 if ended is None else ended.steps
