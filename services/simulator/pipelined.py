"""The engine of an instance that is a pipeline, in virtual time: a pass occupies each stage in turn, for as
long as that one's share of the layers takes.

The next pass may begin when the first stage is free and fewer are under way than there are stages, so what a
pipeline gains is rate, never the time of one pass (DistServe 3.3). Passes stay in order: a short one waits
before a stage that a long one is in. Decodes go in as many batches as there are stages, which take turns
(``DecodeState.lanes``); each of their steps is an event.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefill.events import ChunkSlice, RunChunk
from scheduler.policy.mixed_batching import choose_pass
from services.simulator.clock import Clock, Timer
from services.simulator.engine import BusyTime, EnginePass, EngineSettings
from services.simulator.hardware import ComputedWork
from services.simulator.performance.interface import FrontLoaded
from services.simulator.shape import PassShape


class StagedRooms(Protocol):
    """Whose passes it computes."""

    def decode_shape(self, lane: int) -> tuple[int, int]:
        """(sequences, tokens of context) of the step that is due."""
        ...

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int) -> None: ...

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
    _chunk: RunChunk | None = None
    _lanes: dict[int, float] = field(default_factory=dict)
    _is_starting: bool = False
    _is_dead: bool = False

    def __post_init__(self) -> None:
        self._free_s = [0.0] * len(self.shares)

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
        self.settings = settings

    def wait_chunk(self, chunk: RunChunk) -> None:
        """The prefill room's next work."""
        self._chunk = chunk
        self._look()

    def wait_step(self, lane: int = 0) -> None:
        """The decode room's, of that lane."""
        self._lanes[lane] = self.clock.now
        self._look()

    def catch_up(self) -> None:
        """No pass is cut."""

    def look_ahead(self) -> None:
        """No step runs on."""

    def untold_steps(self) -> int:
        return 0

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

    def _begin(self, now: float) -> None:
        chunk, lane = self._chunk, next(iter(self._lanes), None)
        if chunk is not None and lane is not None:
            waited_s = now - self._lanes[lane]
            phases = choose_pass(self.settings.mixed_policy, waited_s, self.settings.mixed_max_wait_s)
            chunk = chunk if "prefill" in phases else None
            lane = lane if "decode" in phases else None
        sequences = context = 0
        if lane is not None:
            del self._lanes[lane]
            sequences, context = self.rooms.decode_shape(lane)
        chunks: tuple[tuple[int, int], ...] = ()
        if chunk is not None:
            self._chunk = None
            chunks = tuple((piece.start, piece.tokens) for piece in chunk.slices)
        shape = PassShape(chunks, sequences, context)
        duration_s = self.settings.pass_s(shape)
        stages = self._occupy(duration_s, min(duration_s, self._front_s(shape)))
        begun = _Pass(self.passes, stages, duration_s, lane, sequences, context, chunk)
        self.passes += 1
        self._under_way.append(begun)
        begun.timers.append(self.clock.at(begun.stages[-1][1], lambda: self._end(begun)))
        if len(self.shares) > 1:
            begun.timers.append(self.clock.at(begun.stages[0][1], self._make_room))
        self.look_at_layers()

    def _front_s(self, shape: PassShape) -> float:
        performance = self.settings.performance
        return performance.front_s(shape) if isinstance(performance, FrontLoaded) else 0.0

    def _occupy(self, duration_s: float, front_s: float) -> tuple[tuple[float, float], ...]:
        """Each stage in turn, once the pass before has left it; the first one for ``front_s`` longer."""
        stages, ready_s, shared_s = [], self.clock.now, duration_s - front_s
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

    def layers_done(self) -> int:
        """That are computed now and to be told of, of the oldest chunk; 0 where it is none, or was told."""
        oldest = self._oldest()
        if oldest is None:
            return 0
        each, every = oldest
        done = each.layers_at(self.clock.now, self.shares, self.layers) // every * every
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
            each.layer_timer = self.clock.at(due_s, lambda: self._end_layers(each))

    def _end_layers(self, each: _Pass) -> None:
        each.layer_timer = None
        oldest = self._oldest()
        if oldest is not None and oldest[0] is each:
            layers = self.layers_done()
            if layers:
                self.rooms.end_layers(layers)
            self.look_at_layers()
