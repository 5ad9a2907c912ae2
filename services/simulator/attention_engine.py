"""A decode instance's engine in virtual time where its KV lies on attention workers: a batch a lane, which
take turns on model replicas and share the workers (``decode.pipeline`` and ``attention.engine`` live).

Batches get on as fast as what they share lets them (``attention_rates``): a lane's step takes as long as its
layers do at that pace. A lane's steps that follow on one another are one event, and what reaches the instance
meanwhile cuts them, as in ``engine``. Whoever begins, ends or changes in size sets the pace of all anew who
share workers with it. Batches that need a worker which does not answer stand still, until it does or is given
up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from decode.attention_needs import ANSWER_TIMEOUT_S
from prefill.events import RunChunk
from scheduler.policy.staggering import Staggering
from services.simulator.attention_cost import AttentionCost, Rows
from services.simulator.attention_course import Course, NetworkTime, Pools
from services.simulator.attention_host import HostShare
from services.simulator.attention_rates import Batch, demands_of, layer_rates
from services.simulator.clock import Clock
from services.simulator.computed_work import ComputedWork
from services.simulator.conditions import SlowedPerformance
from services.simulator.engine import BusyTime, EnginePass, EngineSettings
from services.simulator.step_times import StepTimes


class Lanes(Protocol):
    """Whose steps it computes."""

    def lane_rows(self, lane: int) -> Rows:
        """Of the step that is due."""
        ...

    def steps_ahead(self, lane: int) -> int:
        """Of the step that is computed."""
        ...

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int) -> None: ...


@dataclass(slots=True)
class WorkerUse:
    """Seconds of attention of each worker, and what all of them computed."""

    busy_s: dict[str, float] = field(default_factory=dict)
    work: ComputedWork = field(default_factory=ComputedWork)


@dataclass(slots=True, eq=False)
class SharedPace:
    """Of all who use the same workers: their courses. ``share``: of a machine that they share with others, if
    they do."""

    clock: Clock
    share: HostShare | None = None
    courses: list[Course] = field(default_factory=list)
    _is_stale: bool = False

    def add(self, course: Course) -> None:
        self.courses.append(course)
        self._is_stale = True

    def remove(self, course: Course) -> None:
        if course.timer is not None:
            self.clock.cancel(course.timer)
        self.courses.remove(course)
        self._is_stale = True

    def note_changed(self) -> None:
        self._is_stale = True

    def catch_up(self) -> None:
        """Before something changes that steps under way hang on."""
        for engine in list(dict.fromkeys(course.engine for course in self.courses)):
            engine.catch_up()
            engine.look_ahead()

    def settle(self) -> None:
        """Sets the pace anew, if anything has changed since it was."""
        if not self._is_stale:
            return
        self._is_stale = False
        now = self.clock.now
        for course in self.courses:
            course.advance(now)
        moving = [course for course in self.courses if not self._is_stuck(course)]
        batches = _batches(moving, 0)
        if self.share is not None:
            rates = layer_rates(demands_of(batches))
            steps_per_s = sum(
                rate / course.engine.cost.layers for course, rate in zip(moving, rates, strict=True)
            )
            self.share.host.want(self, *self.share.wanted(moving, rates), passes_per_s=steps_per_s)
        if not moving:
            return
        first = self._slowed(moving, batches)
        looked = {0: layer_rates(demands_of(first))}
        offline_s = [1.0 / rate for rate in layer_rates(demands_of(first, is_offline=True))]
        # All are looked at at the same steps, some of which a shorter one does not come to: what its steps
        # take then comes out elsewhere within StepTimes' tolerance than if it were looked at alone.
        most = max(course.steps - course.done for course in moving)
        for index, course in enumerate(moving):
            if course.timer is not None:
                self.clock.cancel(course.timer)
            if course.done >= course.steps:
                course.timer = self.clock.at(now, partial(course.engine.end, course))
                continue
            course.since_s, course.first = now, course.done
            course.times = StepTimes(partial(self._step_s, moving, looked, index), most)
            layer_s = self._step_s(moving, looked, index, 0) / course.engine.cost.layers
            course.exposed = max(0.0, 1.0 - offline_s[index] / layer_s)
            course.timer = self.clock.at(course.end_s(course.steps), partial(course.engine.end, course))

    def _is_stuck(self, course: Course) -> bool:
        """Then it gets nowhere, and its instance gives somebody up after a while."""
        if course.done >= course.steps or not course.engine.pools.is_waiting(course.rows):
            course.stuck_s = None
            return False
        if course.timer is not None:
            self.clock.cancel(course.timer)
        course.times = None
        if course.stuck_s is None:
            course.stuck_s = self.clock.now
        course.timer = self.clock.at(
            course.stuck_s + ANSWER_TIMEOUT_S, partial(course.engine.give_up, course)
        )
        return True

    def change_pace(self) -> None:
        """The host's has changed, or who computes beside."""
        self._is_stale = True
        self.settle()

    def _step_s(
        self, moving: list[Course], looked: dict[int, list[float]], index: int, steps_on: int
    ) -> float:
        if steps_on not in looked:
            batches = self._slowed(moving, _batches(moving, steps_on))
            looked[steps_on] = layer_rates(demands_of(batches))
        return moving[index].engine.cost.layers / looked[steps_on][index]

    def _slowed(self, moving: list[Course], batches: list[Batch]) -> list[Batch]:
        if self.share is None:
            return batches
        return [
            each._replace(cost=self.share.slowed(each.cost, course.engine.cost.layers, self))
            for course, each in zip(moving, batches, strict=True)
        ]


def _batches(moving: list[Course], steps_on: int) -> list[Batch]:
    """Where all are so many steps further on."""
    return [each.as_batch(steps_on) for each in moving]


@dataclass(slots=True, eq=False)
class AttentionEngine:
    """``turns``: of the lanes on model replicas."""

    clock: Clock
    lanes: Lanes
    cost: AttentionCost
    turns: Staggering
    pace: SharedPace
    pools: Pools
    use: WorkerUse
    note_pass: Callable[[EnginePass], None] | None = None
    busy: BusyTime = field(default_factory=BusyTime)
    work: ComputedWork = field(default_factory=ComputedWork)
    network: NetworkTime = field(default_factory=NetworkTime)
    passes: int = 0
    _courses: dict[int, Course] = field(default_factory=dict)
    _begun: dict[int, Course] = field(default_factory=dict)
    _is_dead: bool = False

    @property
    def is_idle(self) -> bool:
        return not self._courses

    def die(self) -> None:
        self._is_dead = True
        for course in self._courses.values():
            self.pace.remove(course)
        self._courses.clear()
        self.pace.settle()

    def wait_chunk(self, chunk: RunChunk) -> None:
        raise ValueError("an instance without KV of its own computes no prompts")

    def change_settings(self, settings: EngineSettings) -> None:
        """Of what is said there an instance's own slowness and its link count; from now on."""
        performance, link_share = settings.performance, settings.link_share
        slowness = performance.times if isinstance(performance, SlowedPerformance) else 1.0
        if (slowness, link_share) != (self.cost.slowness, self.cost.link_share):
            self.pace.catch_up()
            self.cost = replace(self.cost, slowness=slowness, link_share=link_share)
            self.pools.change_link(link_share)
            self.pace.note_changed()
            self.pace.settle()

    def untold_steps(self) -> tuple[int, ...]:
        """An instance over workers catches up before it reports."""
        self.catch_up()
        self.look_ahead()
        return ()

    def layers_done(self) -> int:
        return 0

    def look_at_layers(self) -> None:
        """There are no chunks."""

    def wait_step(self, lane: int = 0) -> None:
        """The lane's next one, which begins at once: where the one before it ended, if that was in the
        past."""
        if self._is_dead:
            return
        now = self.clock.now
        course = Course(self, lane, self.lanes.lane_rows(lane), 1, now, now, now)
        before = self._begun.pop(lane, None)
        if before is not None:
            course.fraction = before.fraction
            course.began_s = course.step_began_s = before.step_began_s
            course.stuck_s = before.stuck_s
        self.passes += 1
        self._courses[lane] = course
        self.pace.add(course)

    def catch_up(self) -> None:
        """Tells what has been computed by now of steps that run on."""
        now = self.clock.now
        for course in self._courses.values():
            course.advance(now)
        told = sorted(
            (each for each in self._courses.values() if each.done), key=lambda each: each.step_began_s
        )
        for course in told:
            if course.done < course.steps:
                self._tell(course)
        # Those that have come to their ends change what others do: first comes what was before that.
        over = [each for each in told if each.done == each.steps]
        for course in over if len(over) == 1 else [self._tell_all_but_last(each) for each in over]:
            self._tell(course)

    def _tell_all_but_last(self, course: Course) -> Course:
        """The last step, which is over, too."""
        if course.done == 1:
            return course
        lane, ended_s = course.lane, course.step_began_s
        course.done -= 1
        course.step_began_s -= course.last_s
        rows, began_s = tuple(each.grown(course.done) for each in course.rows), course.step_began_s
        self._tell(course)
        self.pace.remove(self._courses[lane])
        last = Course(self, lane, rows, 1, self.clock.now, began_s, ended_s, 1, 0.0, ended_s, course.last_s)
        self._courses[lane] = last
        self.pace.add(last)
        return last

    def look_ahead(self) -> None:
        """After an event: whether steps run on for as long as it seemed."""
        for lane, course in self._courses.items():
            steps = max(course.done, self.lanes.steps_ahead(lane))
            if steps != course.steps:
                course.steps = steps
                self.pace.note_changed()
        self.pace.settle()

    def end(self, course: Course) -> None:
        """Its last step ends now."""
        self.catch_up()
        if self._courses.get(course.lane) is course:
            # By less than a hair's breadth it has not.
            self.pace.note_changed()
        self.look_ahead()

    def give_up(self, course: Course) -> None:
        """Its step waits for somebody who does not answer."""
        self.pools.give_up(course.rows)
        self.pace.settle()

    def _tell(self, course: Course) -> None:
        lane, steps = course.lane, course.done
        del self._courses[lane]
        self.pace.remove(course)
        self._count(course)
        self._begun[lane] = course
        times = (course.first_end_s, course.step_began_s, course.last_s)
        self.lanes.end_steps(steps, *times, lane)
        self._begun.pop(lane, None)

    def _count(self, course: Course) -> None:
        """What its steps that are done used."""
        steps, layers = course.done, self.cost.layers
        sequences = sum(each.sequences for each in course.rows)
        first, last = (
            self.cost.layer(
                tuple(each.grown(on) for each in course.rows), self.pools.workers, self.pools.others
            )
            for on in (0, steps - 1)
        )
        self.busy.decode_s += steps * layers * first.slice_s / self.turns.replicas
        self.network.sent_s += steps * layers * first.sent_s
        self.work.add_rows(sequences, steps)
        busy_s = self.use.busy_s
        for one, other in zip(first.shares, last.shares, strict=True):
            seconds = steps * layers * (one.attention_s + other.attention_s) / 2
            for worker in one.workers:
                busy_s[worker] = busy_s.get(worker, 0.0) + seconds
        for each in course.rows:
            self.use.work.add_attention(each.sequences, each.context_tokens, steps)
        if self.note_pass is not None:
            context = sum(each.context_tokens for each in course.rows)
            times = (course.began_s, course.step_began_s)
            self.note_pass(EnginePass(*times, None, sequences, context, steps, course.lane, is_lane=True))
