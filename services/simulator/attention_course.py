"""How far a lane's steps over attention workers have come, at paces that change."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler.policy.staggering import Staggering
from services.simulator.attention_cost import AttentionCost, LayerCost, Rows
from services.simulator.attention_rates import Batch
from services.simulator.clock import Timer
from services.simulator.conditions import Fares
from services.simulator.step_times import StepTimes

HAIR = 1e-9
"""Of a step: less than that is not left of one."""
ROUNDINGS = 4
"""Nor is less than so many times what a clock's time is rounded by, or late in a long run no step would end:
its end is a sum of so many times, and what has passed since it began is rounded, too."""


class Pools(Protocol):
    """Whose workers attend. ``workers``: of each pool that there ever was; ``others``: that fare otherwise
    than they should."""

    workers: dict[int, tuple[str, ...]]

    @property
    def others(self) -> Mapping[str, Fares]: ...

    def is_waiting(self, rows: Rows) -> bool:
        """Whether they need somebody who does not answer, and was not given up."""
        ...

    def give_up(self, rows: Rows) -> None:
        """Whoever of theirs does not answer."""
        ...

    def change_link(self, share: float) -> None:
        """The instance's own, from which they are reached."""
        ...


@dataclass(slots=True)
class NetworkTime:
    """Seconds of all steps' exchanges, one after another, and by how much they made steps longer."""

    sent_s: float = 0.0
    exposed_s: float = 0.0


class Replicas(Hashable, Protocol):
    """Whose lane it is: the engine of a decode instance. ``turns``: of its lanes on model replicas."""

    cost: AttentionCost
    turns: Staggering
    pools: Pools
    network: NetworkTime

    def catch_up(self) -> None: ...

    def look_ahead(self) -> None: ...

    def end(self, course: "Course") -> None:
        """Its last step ends now."""
        ...

    def give_up(self, course: "Course") -> None:
        """Its step waits for somebody who does not answer."""
        ...


@dataclass(slots=True, eq=False)
class Course:
    """A lane's steps: ``steps`` of the same ``rows``, of which so many are ``done`` at ``since_s``, and a
    ``fraction`` of the next. ``times``: from step number ``first`` on, at the pace of now. ``exposed``: the
    share of time that the network adds. ``stuck_s``: since when it stands still."""

    engine: Replicas
    lane: int
    rows: Rows
    steps: int
    since_s: float
    began_s: float
    step_began_s: float
    done: int = 0
    fraction: float = 0.0
    first_end_s: float = 0.0
    last_s: float = 0.0
    first: int = 0
    times: StepTimes | None = None
    exposed: float = 0.0
    timer: Timer | None = None
    stuck_s: float | None = None

    def layer_cost(self, steps_on: int) -> LayerCost:
        """Of the step that is so many after the present one."""
        rows = tuple(each.grown(self.done + steps_on) for each in self.rows)
        pools = self.engine.pools
        return self.engine.cost.layer(rows, pools.workers, pools.others)

    def as_batch(self, steps_on: int) -> Batch:
        return Batch(self.layer_cost(steps_on), self.engine.turns, self.engine)

    def end_s(self, steps: int) -> float:
        """When so many, at least one more than are done, have ended."""
        assert self.times is not None
        whole_s = self.times.until(steps - self.first) - self.times.until(self.done - self.first)
        return self.since_s + whole_s - self.fraction * self._step_s(self.done)

    def advance(self, now: float) -> None:
        """What has been computed by now, at the pace until now."""
        if self.times is None or now <= self.since_s:
            return
        elapsed_s = now - self.since_s
        self.engine.network.exposed_s += self.exposed * elapsed_s
        begun_s = self.times.until(self.done - self.first) + self.fraction * self._step_s(self.done)
        done = min(self.steps, self.first + self.times.done_by((begun_s + elapsed_s) * (1 + 1e-12)))
        if done > self.done:
            # What is done by now has ended by now, which sums of times may round past.
            if self.done == 0:
                self.first_end_s = min(now, self.end_s(1))
            last_end_s = min(now, self.end_s(done))
            before_s = self.end_s(done - 1) if done - 1 > self.done else self.step_began_s
            self.last_s, self.step_began_s = last_end_s - before_s, last_end_s
            self.done, self.fraction = done, 0.0
            elapsed_s = max(0.0, now - last_end_s)
        if self.done < self.steps:
            step_s = self._step_s(self.done)
            self.fraction += elapsed_s / step_s
            if (1 - self.fraction) * step_s < max(HAIR * step_s, ROUNDINGS * math.ulp(now)):
                self.first_end_s = self.first_end_s if self.done else now
                self.last_s, self.step_began_s = now - self.step_began_s, now
                self.done, self.fraction = self.done + 1, 0.0
        self.since_s = now

    def _step_s(self, step: int) -> float:
        assert self.times is not None
        place = min(step - self.first, self.times.steps - 1)
        return self.times.until(place + 1) - self.times.until(place)
