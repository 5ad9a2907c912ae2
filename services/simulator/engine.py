"""An instance's engine in virtual time: one pass at a time, of one room or of both, as long as the model of
performance says (``common.shared_engine`` live).

A pass of decodes alone goes on for as many steps as the decode room says follow on one another: that is one
event however many there are. Whatever reaches the instance meanwhile cuts it: first comes what was computed
by then (``catch_up``), and the step under way becomes the first of what is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from common.config import MixedPolicy
from common.messages import Phase
from common.next_pass import next_phases
from common.room_mates import RoomMates
from prefill.events import ChunkSlice, RunChunk
from scheduler.policy.mixed_batching import PassChoice
from services.simulator.clock import Clock, Timer
from services.simulator.computed_work import ComputedWork
from services.simulator.host import PacedWork
from services.simulator.performance.interface import PerformanceModel
from services.simulator.seat import Seat
from services.simulator.shape import PassShape


class Rooms(Protocol):
    """Whose passes it computes."""

    def decode_shape(self) -> tuple[int, int]:
        """(sequences, tokens of context) of the step that is due."""
        ...

    def steps_ahead(self) -> int:
        """Of the step that is computed."""
        ...

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float) -> None:
        """The first of them ended then, and the last then, after ``last_s``."""
        ...

    def end_chunk(self, slices: Sequence[ChunkSlice]) -> None: ...

    def end_layers(self, layers: int) -> None: ...

    def wants_layers(self) -> bool:
        """Whether somebody waits for more of the chunk's KV."""
        ...

    def choose_work(self, phase: Phase, now: float) -> None:
        """That room's: the engine asks for it, amid an event perhaps of a time that is past."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How long passes take, of how many tokens they are, and whose come first where both rooms wait
    (``mixed_batching``). ``stage_shares``: of the layers, that each stage of a pipeline has. ``link_share``:
    of the bandwidth, over which attention workers are reached."""

    performance: PerformanceModel
    mixed_policy: MixedPolicy
    chunk_tokens: int
    mixed_max_wait_s: float
    stage_shares: tuple[float, ...] = (1.0,)
    link_share: float = 1.0

    def pass_s(self, shape: PassShape) -> float:
        """Of a chunk of which nothing is to be computed none, if no decodes go along."""
        return self.performance.pass_s(shape) if shape.chunks or shape.sequences else 0.0

    def pass_choice(self) -> PassChoice:
        return PassChoice(self.mixed_policy, self.chunk_tokens, self.mixed_max_wait_s)


@dataclass(slots=True)
class BusyTime:
    """Seconds of passes, by what was in them."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    both_s: float = 0.0

    @property
    def all_s(self) -> float:
        return self.prefill_s + self.decode_s + self.both_s


class EnginePass(NamedTuple):
    """One that is over, or ``steps`` of the same sequences. ``context_tokens``: of the first one. Passes of
    one ``track`` do not overlap; ``is_lane``: it is one of several batches that are computed at once."""

    began_s: float
    ended_s: float
    chunk: RunChunk | None
    sequences: int
    context_tokens: int
    steps: int
    track: int = 0
    is_lane: bool = False


class _Run(msgspec.Struct, eq=False):
    """What is computed now. ``steps``: of decodes alone, of which ``timer`` waits; 1 for other passes.
    ``course``: at which pace, where cores are shared; else every second of it takes one."""

    began_s: float
    phases: tuple[Phase, ...]
    sequences: int
    context_tokens: int
    steps: int
    duration_s: float
    timer: Timer
    chunk: RunChunk | None = None
    course: PacedWork | None = None
    told_layers: int = 0
    layer_timer: Timer | None = None

    def time_of(self, work_s: float) -> float:
        """When so many seconds of it are done."""
        return self.began_s + work_s if self.course is None else self.course.time_of(work_s)

    def done_by(self, now: float) -> float:
        return now - self.began_s if self.course is None else self.course.done_by(now)


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """``layers``: of the model. ``note_pass`` is told of every pass, where somebody keeps them. ``seat``:
    on the host whose cores it shares, if it has none of its own."""

    clock: Clock
    rooms: Rooms
    settings: EngineSettings
    layers: int
    mates: RoomMates
    note_pass: Callable[[EnginePass], None] | None = None
    seat: Seat | None = None
    busy: BusyTime = field(default_factory=BusyTime)
    work: ComputedWork = field(default_factory=ComputedWork)
    passes: int = 0
    _run: _Run | None = None
    _waiting: dict[Phase, float] = field(default_factory=dict)
    _chunk: RunChunk | None = None
    _is_starting: bool = False
    _asked_s: float = 0.0
    _is_dead: bool = False
    _choice: PassChoice = field(init=False)
    _next_settings: EngineSettings | None = None

    def __post_init__(self) -> None:
        self._choice = self.settings.pass_choice()
        if self.seat is not None:
            self.seat.on_change = self.change_pace

    @property
    def is_idle(self) -> bool:
        return self._run is None and not self._waiting

    def die(self) -> None:
        self._is_dead = True
        run, self._run = self._run, None
        if run is not None:
            self._forget(run)
            self._leave_seat()

    def change_settings(self, settings: EngineSettings) -> None:
        """From the next pass on; of steps that run on, from the one after that which is under way."""
        self.catch_up()
        self._next_settings = settings
        self.look_ahead()

    def wait_chunk(self, chunk: RunChunk) -> None:
        """The prefill room's next work. A step that runs on gives it a turn when it ends."""
        self._chunk = chunk
        self._wait("prefill")

    def wait_step(self, lane: int = 0) -> None:
        """The decode room's, of its only lane."""
        self._wait("decode")

    def _wait(self, phase: Phase) -> None:
        self._waiting[phase] = self.clock.now
        if self._run is not None:
            self.look_ahead()
        elif not self.mates.is_engine_taken:
            self.mates.take_engine()
            self._start_soon()

    def _start_soon(self) -> None:
        """What the last pass has brought about comes in before the next one is chosen."""
        if not self._is_starting:
            self._is_starting = True
            self.clock.soon(self._start)

    def _start(self) -> None:
        self._is_starting = False
        if self._run is not None or self._is_dead:
            return
        phases = self._next_phases(self.clock.now)
        if phases:
            self._begin(self.clock.now, phases)
        else:
            self.mates.leave_engine()

    def _next_phases(self, now: float) -> tuple[Phase, ...]:
        waiting = tuple(self._waiting)
        if len(waiting) == 1 and not self.mates.is_any_due:
            return waiting
        self._asked_s = now
        return next_phases(self, self.mates, self._choice, now)

    def _begin(self, now: float, phases: tuple[Phase, ...], former: _Run | None = None) -> None:
        """``former``: whose steps it follows, as is found amid an event: they ended ``now``, in the past."""
        self.mates.take_engine(*phases)
        if self._next_settings is not None:
            self.settings, self._next_settings = self._next_settings, None
        for phase in phases:
            del self._waiting[phase]
        chunk, steps, sequences, context, prompts = None, 1, 0, 0, 0
        if "decode" in phases:
            sequences, context = self.rooms.decode_shape()
        if "prefill" in phases:
            chunk, self._chunk = self._chunk, None
            assert chunk is not None
            chunks = tuple((piece.start, piece.tokens) for piece in chunk.slices)
            prompts = sum(piece.is_last for piece in chunk.slices)
            duration_s = self.settings.pass_s(PassShape(chunks, sequences, context, prompts))
        else:
            steps = 1 if former is not None else self._steps()
            duration_s = self.settings.performance.steps_s(sequences, context, steps)
        course = None
        if self.seat is not None:
            tokens = 0 if chunk is None else tokens_of(chunk)
            pass_s = duration_s / steps
            self.seat.begin(pass_s, sequences + prompts, tokens)
            pace = self.seat.pace_of(pass_s)
            if former is None or former.course is None:
                course = PacedWork(now, pace)
            else:
                course = former.course.after(now)
                course.change_pace(self.clock.now, pace)
        due_s = now + duration_s if course is None else course.time_of(duration_s)
        timer = self.clock.at(due_s, self._end)
        self.passes += 1
        self._run = _Run(now, phases, sequences, context, steps, duration_s, timer, chunk, course)
        if chunk is not None:
            self.look_at_layers()

    def _steps(self) -> int:
        is_cut = "prefill" in self._waiting or self.mates.is_chunk_due or self._next_settings is not None
        return 1 if is_cut else self.rooms.steps_ahead()

    # decodes alone

    def catch_up(self) -> None:
        """Tells what has been computed by now of steps that run on."""
        run, now = self._run, self.clock.now
        if run is None or run.steps == 1:
            return
        done = self._steps_done(run, now)
        if done:
            self.clock.cancel(run.timer)
            self._run = None
            self._end_steps(run, done)
            ended_s = run.time_of(self._seconds(run, done))
            if phases := self._next_phases(ended_s):
                # The step that followed began when those had ended; what is ahead of it is looked at when
                # the event is over.
                self._begin(ended_s, phases, run)
            else:
                self.mates.leave_engine()
                self._leave_seat()

    def untold_steps(self) -> tuple[int, ...]:
        """That have ended by now of those that run on, of which nobody has been told."""
        run = self._run
        done = 0 if run is None or run.steps == 1 else self._steps_done(run, self.clock.now)
        return (done,) if done else ()

    def look_ahead(self) -> None:
        """After an event: whether steps run on for as long as it seemed."""
        run = self._run
        if run is None or run.chunk is not None:
            return
        steps = self._steps()
        if steps != run.steps:
            self.clock.cancel(run.timer)
            run.steps = steps
            run.duration_s = self._seconds(run, steps)
            run.timer = self.clock.at(run.time_of(run.duration_s), self._end)

    def _steps_done(self, run: _Run, now: float) -> int:
        """The most that had ended by now."""
        elapsed_s = now - run.began_s if run.course is None else run.course.done_by(now)
        if run.duration_s <= elapsed_s:
            return run.steps
        steps_s, sequences, context = self.settings.performance.steps_s, run.sequences, run.context_tokens
        # All take about as long.
        done = int(run.steps * elapsed_s / run.duration_s)
        while done and steps_s(sequences, context, done) > elapsed_s:
            done -= 1
        while done + 1 < run.steps and steps_s(sequences, context, done + 1) <= elapsed_s:
            done += 1
        return done

    def _seconds(self, run: _Run, steps: int) -> float:
        return self.settings.performance.steps_s(run.sequences, run.context_tokens, steps)

    def _end_steps(self, run: _Run, steps: int) -> None:
        whole_s = run.duration_s if steps == run.steps else self._seconds(run, steps)
        first_s, before_s = whole_s, 0.0
        if steps > 1:
            first_s, before_s = self._seconds(run, 1), self._seconds(run, steps - 1)
        if run.course is None:
            first_end_s, ended_s = run.began_s + first_s, run.began_s + whole_s
            last_s, taken_s = whole_s - before_s, whole_s
        else:
            first_end_s, ended_s = run.course.time_of(first_s), run.course.time_of(whole_s)
            taken_s = ended_s - run.began_s
            last_s = ended_s - run.course.time_of(before_s) if steps > 1 else taken_s
        self.busy.decode_s += taken_s
        self.work.add_steps(run.sequences, run.context_tokens, steps)
        self._note(run, steps, ended_s)
        self.rooms.end_steps(steps, first_end_s, ended_s, last_s)

    # every pass

    def _end(self) -> None:
        run, self._run = self._run, None
        assert run is not None, "a pass ended that had not begun"
        self._leave_seat()
        if run.chunk is None:
            self._end_steps(run, run.steps)
        else:
            self._forget(run)
            now = self.clock.now
            taken_s = run.duration_s if run.course is None else now - run.began_s
            chunks = [(piece.start, piece.tokens) for piece in run.chunk.slices]
            self.work.add_mixed(chunks, run.sequences, run.context_tokens)
            if run.sequences:
                self.busy.both_s += taken_s
            else:
                self.busy.prefill_s += taken_s
            self._note(run, 1, run.began_s + taken_s)
            self.rooms.end_chunk(run.chunk.slices)
            if run.sequences:
                self.rooms.end_steps(1, now, now, taken_s)
        if self._run is None:
            if self._waiting or self.mates.is_any_due:
                self._start_soon()
            else:
                self.mates.leave_engine()

    # what ``next_phases`` asks

    def chunk_tokens(self) -> int | None:
        return tokens_of(self._chunk) if self._chunk is not None and "prefill" in self._waiting else None

    def step(self) -> tuple[int, float] | None:
        since_s = self._waiting.get("decode")
        return None if since_s is None else (self.rooms.decode_shape()[0], since_s)

    def ask(self, phase: Phase) -> None:
        self.rooms.choose_work(phase, self._asked_s)

    def _note(self, run: _Run, steps: int, ended_s: float) -> None:
        if self.note_pass is not None:
            rows = (run.sequences, run.context_tokens, steps)
            self.note_pass(EnginePass(run.began_s, ended_s, run.chunk, *rows))

    def _forget(self, run: _Run) -> None:
        self.clock.cancel(run.timer)
        if run.layer_timer is not None:
            self.clock.cancel(run.layer_timer)

    # cores that are shared

    def change_pace(self) -> None:
        """What is computed now gets on at the host's pace, beside whoever computes there, from now on."""
        run, seat = self._run, self.seat
        if run is None or run.course is None or seat is None:
            return
        run.course.change_pace(self.clock.now, seat.pace_of(run.duration_s / run.steps))
        self.clock.cancel(run.timer)
        run.timer = self.clock.at(run.time_of(run.duration_s), self._end)
        if run.layer_timer is not None:
            self.clock.cancel(run.layer_timer)
            run.layer_timer = None
            self.look_at_layers()

    def _leave_seat(self) -> None:
        if self.seat is not None:
            self.seat.end()

    # a chunk's layers

    def layers_done(self, at_least: int = 0) -> int:
        """That are computed now and to be told of, of the chunk; 0 where it is none, or was told.
        ``at_least`` as many are, whose end was waited for: late in a long run the time that has passed since
        the chunk began may be rounded to less."""
        run = self._run
        if run is None or run.chunk is None or run.chunk.report_every is None:
            return 0
        every = run.chunk.report_every
        share = run.done_by(self.clock.now) / run.duration_s if run.duration_s > 0 else 1.0
        done = max(at_least, min(self.layers, int(share * self.layers + 1e-9)) // every * every)
        if done <= run.told_layers:
            return 0
        run.told_layers = done
        return done

    def look_at_layers(self) -> None:
        """Waits for the next layers where somebody waits for their KV; else they are told of later."""
        run = self._run
        if run is None or run.chunk is None or run.chunk.report_every is None or run.layer_timer is not None:
            return
        following = run.told_layers + run.chunk.report_every
        if following <= self.layers and self.rooms.wants_layers():
            due_s = run.time_of(run.duration_s * following / self.layers)
            run.layer_timer = self.clock.at(due_s, lambda: self._end_layers(run, following))

    def _end_layers(self, run: _Run, due: int) -> None:
        run.layer_timer = None
        if self._run is run:
            layers = self.layers_done(due)
            if layers:
                self.rooms.end_layers(layers)
            self.look_at_layers()


def tokens_of(chunk: RunChunk) -> int:
    return sum([piece.tokens for piece in chunk.slices])
