"""An instance's engine in virtual time: one pass at a time, of one room or of both, as
``common.shared_engine`` runs them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.messages import Phase
from common.next_pass import next_phases
from common.room_mates import RoomMates
from common.shared_engine import PHASES
from scheduler.policy.mixed_batching import PassChoice
from services.simulator.clock import Clock


@dataclass(frozen=True, slots=True)
class VirtualWork:
    """``size``: tokens of a chunk, or sequences of a step. ``begin``: its pass does, and takes so long."""

    size: int
    seconds: float
    end: Callable[[], None]
    begin: Callable[[float], None] = lambda _: None


@dataclass(slots=True, eq=False)
class VirtualEngine:
    """``ask_room`` has that room choose its work."""

    clock: Clock
    mates: RoomMates
    choice: PassChoice
    ask_room: Callable[[Phase], None] = lambda _: None
    _waiting: dict[Phase, tuple[VirtualWork, float]] = field(default_factory=dict)
    _is_alive: bool = True

    def submit(self, phase: Phase, work: VirtualWork) -> None:
        assert phase not in self._waiting, "a room has one piece of work at a time"
        self._waiting[phase] = work, self.clock.now
        if not self.mates.is_engine_taken:
            self.mates.take_engine()
            self.clock.after(0.0, self._start)

    def die(self) -> None:
        self._is_alive = False

    def _start(self) -> None:
        if not self._is_alive:
            return
        phases = next_phases(self, self.mates, self.choice, self.clock.now)
        if not phases:
            assert not self._waiting
            self.mates.leave_engine()
            return
        self.mates.take_engine(*phases)
        works = [self._waiting.pop(phase)[0] for phase in PHASES if phase in phases]
        pass_s = sum(work.seconds for work in works)
        for work in works:
            work.begin(pass_s)
        self.clock.after(pass_s, lambda: self._end(works))

    def _end(self, works: list[VirtualWork]) -> None:
        if not self._is_alive:
            return
        for work in works:
            work.end()
        self.clock.after(0.0, self._start)

    # what ``next_phases`` asks

    def chunk_tokens(self) -> int | None:
        waiting = self._waiting.get("prefill")
        return None if waiting is None else waiting[0].size

    def step(self) -> tuple[int, float] | None:
        waiting = self._waiting.get("decode")
        return None if waiting is None else (waiting[0].size, waiting[1])

    def ask(self, phase: Phase) -> None:
        self.ask_room(phase)
