"""Which passes follow on one another in a pipeline that computes decodes alone, until a batch changes.

Passes stay in order, and of each batch one is under way at a time: so batches begin in the order in which
they ended, each as soon as it has and the first stage is free. That is worked out some rounds at a time: a
plan that is cut soon has not cost much.
"""

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


@dataclass(slots=True, eq=False)
class PlannedLane:
    """A batch, ``left`` of whose steps end until it may change, ``steps`` when the plan was made.
    ``sequences`` and ``context_tokens``: of its next pass, which takes ``step_s`` of the latter."""

    lane: int
    steps: int
    sequences: int
    context_tokens: int
    step_s: Callable[[int], float]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.steps


@dataclass(slots=True)
class PipelinePlan:
    """``passes``: those that had begun when it was made, and those that follow; some have been taken.
    ``waiting``: lanes that are ready, and since when. ``begin``: a lane's next pass at that time. ``over_s``:
    when the first lane may change, once that is known. ``ended``: of those that were taken, since it was
    made."""

    passes: list[Planned]
    waiting: list[tuple[int, float]]
    lanes: dict[int, PlannedLane]
    begin: Callable[[PlannedLane, float], Planned]
    free_s: float
    rounds: int = FIRST_ROUNDS
    over_s: float | None = None
    ended: dict[int, Ended] = field(default_factory=dict)
    _taken: int = 0
    """Of ``passes``, the first ones."""
    _ending: list[Planned] = field(init=False)
    """Of each lane the newest, in the order in which they end."""

    def __post_init__(self) -> None:
        self._ending = list(self.passes)

    def extend(self) -> float:
        """Some rounds more; until when it goes: the change, or the last begin, or the end after which nobody
        has looked whether the lane changes, if a later pass is in the first stage for longer."""
        del self.passes[: self._taken]
        self._taken = 0
        room = self.rounds * len(self.lanes)
        self.rounds = min(2 * self.rounds, MOST_ROUNDS)
        while self.over_s is None and room > 0:
            if self.waiting:
                number, ready_s = self.waiting.pop(0)
                lane = self.lanes[number]
            else:
                ended = self._ending.pop(0)
                lane, ready_s = self.lanes[ended.lane], ended.end_s
                lane.left -= 1
                if lane.left == 0:
                    self.over_s = ready_s
                    break
            begun = self.begin(lane, max(ready_s, self.free_s))
            self.free_s = begun.stages[0][1]
            self.passes.append(begun)
            self._ending.append(begun)
            room -= 1
        return min(self.passes[-1].begin_s, self._ending[0].end_s) if self.over_s is None else self.over_s

    @property
    def most_steps(self) -> int:
        """Of a lane, until it may change."""
        return max([each.steps for each in self.lanes.values()])

    def goes_on(self, now: float) -> bool:
        """Whether it is known that no lane has changed by then."""
        return now < (self._ending[0].end_s if self.over_s is None else self.over_s)

    def is_over(self, lane: int) -> bool:
        """Whether it may be another one now."""
        return self.ended[lane].steps >= self.lanes[lane].steps

    def begun(self, now: float) -> list[Planned]:
        """By then, of those that were not taken."""
        return [each for each in self.passes[self._taken :] if each.begin_s <= now]

    def take_ended(self, now: float) -> list[Told]:
        """By now: each lane's at once, in the order of their last ends."""
        found: dict[int, Told] = {}
        while self._taken < len(self.passes):
            step = self.passes[self._taken]
            if step.end_s > now:
                break
            self._taken += 1
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
