"""An instance's engine, which computes for both its rooms: one pass at a time, for one of them or for both.

Each room has at most one piece of work here. Where both have, or want to, ``choice`` says whose goes next
(``common.next_pass``); a pass for both is one run of the model over the prompts' chunk and the decodes' step.
Its chunk is told of first: a sequence that stays here is in the step that follows. Where that fails each is
run by itself: one room's fault is not the other's.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import NamedTuple

from common.engine_thread import EngineThread
from common.messages import Phase, SampledToken
from common.next_pass import Choice, next_phases
from common.performance import PassLoad
from common.room_mates import RoomMates
from common.steps import LayerReports, Runner, SequenceStep
from common.timeline import timeline

log = logging.getLogger("lamella.engine")

Tokens = tuple[SampledToken | None, ...]

PHASES: tuple[Phase, ...] = ("prefill", "decode")
"""In the order in which the rooms are told of a pass."""
MOST_GAP_S = 0.01
"""What lies between a pass and the next for longer is a pause: there was nothing to compute."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """``batch`` makes its part of a pass and ``note`` writes down that it was computed, both on the engine's
    thread: ``note`` is called with when the pass began, where a timeline is recorded. ``load``: what it
    adds to a pass."""

    batch: Callable[[], Sequence[SequenceStep]]
    note: Callable[[int], None]
    load: PassLoad
    reports: LayerReports | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """``elapsed_s`` is the pass's. ``is_alone``: nobody else's work was in it."""

    tokens: Tokens
    elapsed_s: float
    is_alone: bool


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: EngineWork
    since_s: float
    done: asyncio.Future[Computed]

    def tell(self, computed: Computed) -> None:
        """Unless who waits was cancelled."""
        if not self.done.done():
            self.done.set_result(computed)

    def fail(self, exc: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(exc)


def nobody_to_ask(phase: Phase) -> None:
    """Whose work always waits as soon as there is any."""


class Drawn(NamedTuple):
    """Tokens of a pass: of sequences that are decoded, and first ones of prompts."""

    decodes: int = 0
    prompts: int = 0


def drawn_by(works: Sequence[EngineWork], drawn: Sequence[Tokens]) -> Drawn:
    """By each work's tokens."""
    decodes = prompts = 0
    for work, tokens in zip(works, drawn, strict=True):
        count = sum(token is not None for token in tokens)
        if work.load.sequences:
            decodes += count
        else:
            prompts += count
    return Drawn(decodes, prompts)


@dataclass(slots=True)
class PassClock:
    """How long the model rests between a pass and the one that follows on it: tokens are told, the next work
    is chosen, its batch is made. ``gap_s``: before the newest pass; None before one that came after a
    pause, a failure or nothing. ``waited_s``: of the newest pass, in which its thread did not run."""

    gap_s: float | None = None
    waited_s: float = 0.0
    _began_s: float = 0.0
    _ran_s: float = 0.0
    _ended_s: float | None = None

    def begin(self) -> None:
        """A pass does, on the engine's thread."""
        self._began_s, self._ran_s = time.perf_counter(), time.thread_time()
        ended_s, self._ended_s, self.gap_s = self._ended_s, None, None
        if ended_s is not None and (gap_s := self._began_s - ended_s) <= MOST_GAP_S:
            self.gap_s = gap_s

    def end(self) -> None:
        self._ended_s = time.perf_counter()
        self.waited_s = max(0.0, self._ended_s - self._began_s - (time.thread_time() - self._ran_s))


def compute_together(
    runner: Runner, works: Sequence[EngineWork], clock: PassClock | None = None
) -> list[Tokens]:
    """Runs on the engine's thread: the tokens of each."""
    clock = PassClock() if clock is None else clock
    began_ns = timeline.begin()
    batches = [work.batch() for work in works]
    reports = next((work.reports for work in works if work.reports is not None), None)
    steps = [step for batch in batches for step in batch]
    clock.begin()
    drawn = iter(runner.run(steps, reports))
    clock.end()
    if began_ns:
        for work in works:
            work.note(began_ns)
    return [tuple(islice(drawn, len(batch))) for batch in batches]


@dataclass(slots=True)
class SharedEngine:
    """``spawn`` starts a task in the process's task group. ``choice``: where both rooms want a pass;
    ``ask_room`` has one of them choose its next work, where that is due.
    ``note_pass`` is told of every pass what it computed, and its seconds; ``note_wait`` of its
    ``PassClock.waited_s``; ``note_gap`` of every ``gap_s``, and what the pass before it has ``Drawn``."""

    runner: Runner
    thread: EngineThread
    spawn: Callable[[Coroutine[None, None, None]], None]
    mates: RoomMates
    choice: Choice
    note_pass: Callable[[PassLoad, float], None]
    note_wait: Callable[[float], None]
    note_gap: Callable[[float, int, int], None]
    ask_room: Callable[[Phase], None] = nobody_to_ask
    _clock: PassClock = field(default_factory=PassClock)
    _drawn: Drawn = field(default_factory=Drawn)
    _waiting: dict[Phase, _Waiting] = field(default_factory=dict)
    _is_running: bool = False

    def submit(self, phase: Phase, work: EngineWork) -> asyncio.Future[Computed]:
        """Waits for its turn from now on. Raises what the runner raised, when it is awaited."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(work, loop.time(), loop.create_future())
        self._waiting[phase] = waiting
        if not self._is_running:
            self._is_running = True
            self.mates.take_engine()
            self.spawn(self._run_passes())
        return waiting.done

    async def _run_passes(self) -> None:
        """Until nobody waits: who wakes the rooms is neither of them, so that both are woken in order."""
        try:
            while True:
                # What the last pass has brought about comes in before the next one is chosen, or the engine
                # is left: rooms wake, and what they start for their next work asks for it.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                chosen = self._take_next(asyncio.get_running_loop().time())
                if not chosen:
                    return
                await self._run_chosen(chosen)
        finally:
            self._is_running = False
            self.mates.leave_engine()

    async def _run_chosen(self, chosen: Sequence[_Waiting]) -> None:
        """Whatever happens, each of them is told."""
        try:
            await self._run_pass(chosen)
        except Exception as exc:
            for each in chosen:
                each.fail(exc)
        finally:
            for each in chosen:
                each.done.cancel()

    async def _run_pass(self, chosen: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            drawn = await self._compute(chosen)
        except Exception as exc:
            await self._run_apart(chosen, exc)
            return
        elapsed_s = loop.time() - began_s
        load = reduce(PassLoad.with_also, (each.work.load for each in chosen))
        self.note_pass(load, elapsed_s)
        self._note_clock([each.work for each in chosen], drawn)
        for each, tokens in zip(chosen, drawn, strict=True):
            each.tell(Computed(tokens, elapsed_s, len(chosen) == 1))

    async def _run_apart(self, chosen: Sequence[_Waiting], failed: Exception) -> None:
        """After a pass that failed: it has drawn nothing, and what it wrote is written again. Its layers may
        have been told of already: they are not told of twice."""
        if len(chosen) == 1:
            chosen[0].fail(failed)
            return
        log.error("pass_failed", exc_info=failed, extra={"works": len(chosen)})
        for each in chosen:
            began_s = asyncio.get_running_loop().time()
            alone = replace(each, work=replace(each.work, reports=None))
            try:
                [tokens] = await self._compute([alone])
            except Exception as exc:
                each.fail(exc)
            else:
                elapsed_s = asyncio.get_running_loop().time() - began_s
                self.note_pass(each.work.load, elapsed_s)
                self._note_clock([each.work], [tokens])
                each.tell(Computed(tokens, elapsed_s, is_alone=True))

    def _note_clock(self, works: Sequence[EngineWork], drawn: Sequence[Tokens]) -> None:
        """Of the newest pass. A sequence whose KV was lost has drawn nothing."""
        before, self._drawn = self._drawn, drawn_by(works, drawn)
        self.note_wait(self._clock.waited_s)
        if self._clock.gap_s is not None:
            self.note_gap(self._clock.gap_s, *before)

    async def _compute(self, chosen: Sequence[_Waiting]) -> list[Tokens]:
        works = [each.work for each in chosen]
        return await self.thread.run(compute_together, self.runner, works, self._clock)

    def _take_next(self, now: float) -> list[_Waiting]:
        """Nothing where all that waited have given up, and nobody has anything to compute."""
        for phase in [phase for phase, each in self._waiting.items() if each.done.done()]:
            del self._waiting[phase]
        phases = next_phases(self, self.mates, self.choice, now)
        if phases:
            self.mates.take_engine(*phases)
        return [self._waiting.pop(phase) for phase in PHASES if phase in phases]

    # what ``next_phases`` asks

    def chunk_tokens(self) -> int | None:
        prompts = self._waiting.get("prefill")
        return None if prompts is None else prompts.work.load.chunk_tokens

    def step(self) -> tuple[int, float] | None:
        decodes = self._waiting.get("decode")
        return None if decodes is None else (decodes.work.load.sequences, decodes.since_s)

    def ask(self, phase: Phase) -> None:
        self.ask_room(phase)
