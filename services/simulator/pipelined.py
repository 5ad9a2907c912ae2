"""The engine of an instance that is a pipeline, in virtual time: a pass occupies each stage in turn, for as
long as that one's share of the layers takes.

The next pass may begin when the first stage is free and fewer are under way than there are stages, so what a
pipeline gains is rate, never the time of one pass (DistServe 3.3). Passes stay in order: a short one waits
before a stage that a long one is in. Decodes go in as many batches as there are stages, which take turns
(``DecodeState.lanes``). While there are decodes alone their passes are planned, without an event for each
(``pipeline_plan``): what reaches the instance, and a step that may change a batch, ends the plan.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefill.events import ChunkSlice, RunChunk
from scheduler.policy.mixed_batching import PassChoice
from services.simulator.clock import Clock, Timer
from services.simulator.computed_work import ComputedWork
from services.simulator.engine import BusyTime, EnginePass, EngineSettings, tokens_of
from services.simulator.performance.interface import FrontLoaded, StepTimes
from services.simulator.pipeline_plan import PipelinePlan, Planned, PlannedLane
from services.simulator.shape import PassShape


class StagedRooms(Protocol):
    """Whose passes it computes."""

    def decode_shape(self, lane: int) -> tuple[int, int]:
        """(sequences, tokens of context) of the step that is due."""
        ...

    def steps_ahead(self, lane: int) -> int:
        """Of the step that is computed, or due."""
        ...

    def has_ample_blocks(self, steps: int) -> bool:
        """Whether memory limits no lane's steps ahead, of which so many are the most, however many of them
        have ended."""
        ...

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int) -> None: ...

    def count_steps(
        self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int, slowest_s: float
    ) -> None:
        """What they took, before somebody is told of them. ``slowest_s``: the most from one's end to the next
        one's."""
        ...

    def tell_steps(self, steps: int, ended_s: float, lane: int) -> None:
        """All that were counted."""
        ...

    def advance_chunk(self) -> None:
        """The newest one has left the first stage, and there is room for another."""
        ...

    def end_chunk(self, slices: Sequence[ChunkSlice]) -> None: ...

    def end_layers(self, layers: int) -> None: ...

    def wants_layers(self) -> bool:
        """Whether somebody waits for more of the oldest chunk's KV."""
        ...


@dataclass(slots=True, eq=False)
class _Pass:
    """``stages``: (begin, end) of each. ``lane`` None: no decodes are in it."""

    number: int
    stages: tuple[tuple[float, float], ...]
    duration_s: float
    lane: int | None
    sequences: int
    context_tokens: int
    chunk: RunChunk | None
    timers: list[Timer] = field(default_factory=list)
    has_advanced: bool = False
    told_layers: int = 0
    layer_timer: Timer | None = None

    def layers_at(self, now: float, shares: tuple[float, ...], layers: int) -> int:
        """That are computed by then."""
        computed = 0.0
        for share, (begin_s, end_s) in zip(shares, self.stages, strict=True):
            if now < end_s:
                computed += share * max(0.0, now - begin_s) / (end_s - begin_s)
                break
            computed += share
        return min(layers, int(computed * layers + 1e-6))

    def layer_end_s(self, layer: int, shares: tuple[float, ...], layers: int) -> float:
        """When the first ``layer`` ones are."""
        wanted = layer / layers
        for share, (begin_s, end_s) in zip(shares, self.stages, strict=True):
            if wanted <= share + 1e-9:
                return begin_s + (end_s - begin_s) * min(1.0, wanted / share)
            wanted -= share
        return self.stages[-1][1]


@dataclass(slots=True, eq=False)
class PipelinedEngine:
    """``layers``: of the model; ``shares`` of them that each stage has. ``note_pass`` is told of every pass,
    where somebody keeps them. ``busy``: seconds of passes over the stages, as each stage is."""

    clock: Clock
    rooms: StagedRooms
    settings: EngineSettings
    layers: int
    shares: tuple[float, ...]
    note_pass: Callable[[EnginePass], None] | None = None
    busy: BusyTime = field(default_factory=BusyTime)
    work: ComputedWork = field(default_factory=ComputedWork)
    passes: int = 0
    _under_way: deque[_Pass] = field(default_factory=deque)
    _free_s: list[float] = field(init=False)
    _front: FrontLoaded | None = field(init=False)
    _step_times: StepTimes | None = field(init=False)
    _chunk: RunChunk | None = None
    _lanes: dict[int, float] = field(default_factory=dict)
    _choice: PassChoice = field(init=False)
    _is_starting: bool = False
    _is_dead: bool = False
    _plan: PipelinePlan | None = None
    _plan_timer: Timer | None = None

    def __post_init__(self) -> None:
        self._choice = self.settings.pass_choice()
        self._free_s = [0.0] * len(self.shares)
        self._look_at_model()

    @property
    def is_idle(self) -> bool:
        return not self._under_way and self._chunk is None and not self._lanes

    def die(self) -> None:
        self._is_dead = True
        for each in self._under_way:
            self._forget(each)
        self._under_way.clear()

    def change_settings(self, settings: EngineSettings) -> None:
        """From the next pass on."""
        self.catch_up()
        self.settings = settings
        self._look_at_model()
        self.look_ahead()

    def _look_at_model(self) -> None:
        """What it can tell: looked at once, as a pass is to cost little."""
        model = self.settings.performance
        self._front = model if isinstance(model, FrontLoaded) else None
        self._step_times = model if isinstance(model, StepTimes) else None

    def wait_chunk(self, chunk: RunChunk) -> None:
        """The prefill room's next work."""
        self.catch_up()
        self._chunk = chunk
        self._look()

    def wait_step(self, lane: int = 0) -> None:
        """The decode room's, of that lane. After a plan it may be under way, or have waited for long."""
        if all(each.lane != lane for each in self._under_way):
            self._lanes.setdefault(lane, self.clock.now)
            self._look()

    def untold_steps(self) -> tuple[int, ...]:
        """Of a plan, which goes on, unless it is over, or might be made otherwise for the memory that there
        is by now."""
        plan = self._plan
        if plan is None:
            return ()
        if not (plan.goes_on(self.clock.now) and self.rooms.has_ample_blocks(plan.most_steps)):
            self.catch_up()
            self.look_ahead()
            return ()
        self._count_ended(plan)
        return tuple(map(plan.steps_ended, range(len(self.shares)))) if plan.ended else ()

    # decodes alone

    def look_ahead(self) -> None:
        """After an event: plans the passes to come, if nobody changes before them."""
        is_alone = self._chunk is None and all(each.chunk is None for each in self._under_way)
        if self._is_starting or self._is_dead or not self._under_way or not is_alone:
            return
        if self._plan is not None or self.note_pass is not None:
            return
        passes = list(map(_planned_of, self._under_way))
        if self.rooms.steps_ahead(passes[0].lane) == 1:
            return
        for begun in self._under_way:
            self._forget(begun)
        lanes = {
            each.lane: self._planned_lane(each.lane, each.sequences, each.context_tokens + each.sequences)
            for each in passes
        }
        for lane in self._lanes:
            lanes[lane] = self._planned_lane(lane, *self.rooms.decode_shape(lane))
        waiting = list(self._lanes.items())
        self._plan = PipelinePlan(passes, waiting, lanes, self._plan_pass, self._free_s[0])
        self._go_on(self._plan)

    def _planned_lane(self, lane: int, sequences: int, context_tokens: int) -> PlannedLane:
        steps = self.rooms.steps_ahead(lane)
        return PlannedLane(lane, steps, sequences, context_tokens, self._step_s_of(sequences))

    def _step_s_of(self, sequences: int) -> Callable[[int], float]:
        times, settings = self._step_times, self.settings
        if times is not None:
            return times.step_s_of(sequences)
        return lambda context_tokens: settings.pass_s(PassShape((), sequences, context_tokens))

    def _go_on(self, plan: PipelinePlan) -> None:
        until_s = plan.extend()
        follows = (lambda: self._go_on(plan)) if plan.over_s is None else self._end_plan
        self._plan_timer = self.clock.at(until_s, follows)

    def _plan_pass(self, lane: PlannedLane, begin_s: float) -> Planned:
        sequences, context = lane.sequences, lane.context_tokens
        lane.context_tokens = context + sequences
        duration_s = lane.step_s(context)
        front_s = 0.0 if self._front is None else self._front.front_s(PassShape((), sequences, context))
        return Planned(lane.lane, self._occupy(duration_s, front_s, begin_s), duration_s, sequences, context)

    def _end_plan(self) -> None:
        self.catch_up()
        self.look_ahead()

    def catch_up(self) -> None:
        """Tells what has been computed by now of a plan; what is under way goes on, and the rest is chosen
        anew."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        if self._plan_timer is not None:
            self.clock.cancel(self._plan_timer)
        now, ready_s = self.clock.now, self._lanes
        self._count_ended(plan)
        # The last one may have changed its batch.
        ended = sorted(plan.ended.items(), key=lambda item: item[1].last.end_s)
        begun = plan.begun(now)
        self.passes += sum(each.steps for _, each in ended) + len(begun) - len(self._under_way)
        newest = begun[-1] if begun else ended[-1][1].last
        self._free_s = [end_s for _, end_s in newest.stages]
        self._under_way = deque(map(self._resume, begun))
        ready_s |= {lane: each.last.end_s for lane, each in ended}
        over = {lane for lane, _ in ended if plan.is_over(lane)} | {each.lane for each in begun}
        waiting = sorted(ready_s.items(), key=lambda item: item[1])
        self._lanes = {lane: since_s for lane, since_s in waiting if lane not in over}
        for lane, each in ended:
            self.rooms.tell_steps(each.steps, each.last.end_s, lane)

    def _count_ended(self, plan: PipelinePlan) -> None:
        """What they took that have ended by now."""
        for each in plan.take_ended(self.clock.now):
            first, last = each.first, each.last
            self.busy.decode_s += each.duration_s / len(self.shares)
            self.work.add_steps(first.sequences, first.context_tokens, each.steps)
            last_s = last.end_s - last.begin_s
            self.rooms.count_steps(each.steps, first.end_s, last.end_s, last_s, each.lane, each.slowest_s)

    def _resume(self, planned: Planned) -> _Pass:
        """A plan's, that is under way."""
        resumed = _Pass(
            self.passes,
            planned.stages,
            planned.duration_s,
            planned.lane,
            planned.sequences,
            planned.context_tokens,
            None,
        )
        self._await(resumed)
        return resumed

    # every pass

    def _can_begin(self) -> bool:
        is_free = self._free_s[0] <= self.clock.now
        return is_free and len(self._under_way) < len(self.shares) and not self._is_dead

    def _look(self) -> None:
        """What the last event has brought about comes in before the next pass is chosen."""
        waits = self._chunk is not None or self._lanes
        if waits and self._can_begin() and not self._is_starting:
            self._is_starting = True
            self.clock.soon(self._start)

    def _start(self) -> None:
        self._is_starting = False
        if self._can_begin():
            self._advance()
            if self._chunk is not None or self._lanes:
                self._begin(self.clock.now)
        self.look_ahead()

    def _begin(self, now: float) -> None:
        chunk, lane = self._chunk, next(iter(self._lanes), None)
        if chunk is not None and lane is not None:
            tokens, step_since_s = tokens_of(chunk), self._lanes[lane]
            phases = self._choice.choose(tokens, self.rooms.decode_shape(lane)[0], step_since_s, now)
            chunk = chunk if "prefill" in phases else None
            lane = lane if "decode" in phases else None
        sequences = context = prompts = 0
        if lane is not None:
            del self._lanes[lane]
            sequences, context = self.rooms.decode_shape(lane)
        chunks: tuple[tuple[int, int], ...] = ()
        if chunk is not None:
            self._chunk = None
            chunks = tuple((piece.start, piece.tokens) for piece in chunk.slices)
            prompts = sum(piece.is_last for piece in chunk.slices)
        shape = PassShape(chunks, sequences, context, prompts)
        duration_s = self.settings.pass_s(shape)
        front_s = 0.0 if self._front is None else self._front.front_s(shape)
        stages = self._occupy(duration_s, front_s, now)
        begun = _Pass(self.passes, stages, duration_s, lane, sequences, context, chunk)
        self.passes += 1
        self._under_way.append(begun)
        self._await(begun)
        self.look_at_layers()

    def _await(self, begun: _Pass) -> None:
        begun.timers.append(self.clock.at(begun.stages[-1][1], lambda: self._end(begun)))
        if len(self.shares) > 1 and begun.stages[0][1] > self.clock.now:
            begun.timers.append(self.clock.at(begun.stages[0][1], self._make_room))

    def _occupy(self, duration_s: float, front_s: float, begin_s: float) -> tuple[tuple[float, float], ...]:
        """Each stage in turn, once the pass before has left it. ``front_s``: of the first one alone."""
        front_s = min(duration_s, front_s)
        stages, ready_s, shared_s = [], begin_s, duration_s - front_s
        for place, share in enumerate(self.shares):
            begin_s = max(ready_s, self._free_s[place])
            ready_s = self._free_s[place] = begin_s + share * shared_s + (0.0 if place else front_s)
            stages.append((begin_s, ready_s))
        return tuple(stages)

    def _make_room(self) -> None:
        """The first stage is free, or the last."""
        if self._can_begin():
            self._advance()
            self._look()

    def _advance(self) -> None:
        newest = self._under_way[-1] if self._under_way else None
        if newest is not None and newest.chunk is not None and not newest.has_advanced:
            newest.has_advanced = True
            self.rooms.advance_chunk()

    def _end(self, ended: _Pass) -> None:
        self._under_way.popleft()
        self._forget(ended)
        began_s, now = ended.stages[0][0], self.clock.now
        self._count(ended)
        if self.note_pass is not None:
            track = ended.number % len(self.shares)
            rows = (ended.sequences, ended.context_tokens, 1)
            self.note_pass(EnginePass(began_s, now, ended.chunk, *rows, track))
        if ended.chunk is not None:
            self.rooms.end_chunk(ended.chunk.slices)
        if ended.lane is not None:
            self.rooms.end_steps(1, now, now, now - began_s, ended.lane)
        self._make_room()
        self.look_at_layers()
        self.look_ahead()

    def _count(self, ended: _Pass) -> None:
        """Each stage is busy for its share of it."""
        busy_s = ended.duration_s / len(self.shares)
        if ended.chunk is None:
            self.work.add_steps(ended.sequences, ended.context_tokens, 1)
            self.busy.decode_s += busy_s
            return
        chunks = [(piece.start, piece.tokens) for piece in ended.chunk.slices]
        self.work.add_mixed(chunks, ended.sequences, ended.context_tokens)
        if ended.sequences:
            self.busy.both_s += busy_s
        else:
            self.busy.prefill_s += busy_s

    def _forget(self, forgotten: _Pass) -> None:
        for timer in (*forgotten.timers, forgotten.layer_timer):
            if timer is not None:
                self.clock.cancel(timer)

    # a chunk's layers

    def _oldest(self) -> tuple[_Pass, int] | None:
        """The oldest chunk's pass, and how many layers it reports at a time; None where none reports."""
        for each in self._under_way:
            if each.chunk is not None:
                every = each.chunk.report_every
                return None if every is None else (each, every)
        return None

    def layers_done(self, at_least: int = 0) -> int:
        """As ``SimulatedEngine.layers_done``, of the oldest chunk."""
        oldest = self._oldest()
        if oldest is None:
            return 0
        each, every = oldest
        done = max(at_least, each.layers_at(self.clock.now, self.shares, self.layers) // every * every)
        if done <= each.told_layers:
            return 0
        each.told_layers = done
        return done

    def look_at_layers(self) -> None:
        """Waits for the next layers where somebody waits for their KV; else they are told of later."""
        oldest = self._oldest()
        if oldest is None:
            return
        each, every = oldest
        following = each.told_layers + every
        if each.layer_timer is None and following <= self.layers and self.rooms.wants_layers():
            due_s = each.layer_end_s(following, self.shares, self.layers)
            each.layer_timer = self.clock.at(due_s, lambda: self._end_layers(each, following))

    def _end_layers(self, each: _Pass, due: int) -> None:
        each.layer_timer = None
        oldest = self._oldest()
        if oldest is not None and oldest[0] is each:
            layers = self.layers_done(due)
            if layers:
                self.rooms.end_layers(layers)
            self.look_at_layers()


def _planned_of(under_way: _Pass) -> Planned:
    assert under_way.lane is not None, "a pass of nothing"
    return Planned(
        under_way.lane,
        under_way.stages,
        under_way.duration_s,
        under_way.sequences,
        under_way.context_tokens,
    )
