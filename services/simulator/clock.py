"""Virtual time: what is due, in the order of its time, and of its scheduling where that is the same."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

Action = Callable[[], None]


class Timer(msgspec.Struct, eq=False):
    """``action`` None: it was cancelled, or has happened."""

    due_s: float
    action: Action | None


@dataclass(slots=True)
class Clock:
    """``events``: how many things have happened. ``turn``: of what happens now, among all that were
    scheduled. ``is_halted``: nothing happens until it is let run again."""

    now: float = 0.0
    events: int = 0
    turn: int = 0
    is_halted: bool = False
    _due: list[tuple[float, int, Timer]] = field(default_factory=list)
    _soon: deque[Action] = field(default_factory=deque)
    _scheduled: int = 0

    def at(self, time_s: float, action: Action) -> Timer:
        """Never before now."""
        due_s = time_s if time_s > self.now else self.now
        timer = Timer(due_s, action)
        turn = self._scheduled = self._scheduled + 1
        heappush(self._due, (due_s, turn, timer))
        return timer

    def after(self, delay_s: float, action: Action) -> Timer:
        return self.at(self.now + delay_s, action)

    def soon(self, action: Action) -> None:
        """At this same time, once what happens now is over and before anything that is due."""
        self._soon.append(action)

    def take_turn(self) -> int:
        """Of what is not scheduled here, but had better come in its turn."""
        self._scheduled += 1
        return self._scheduled

    def cancel(self, timer: Timer) -> None:
        """Also of one that has happened."""
        timer.action = None

    def halt(self) -> None:
        """``run_until`` ends with what happens now."""
        self.is_halted = True

    def run_until(self, time_s: float, is_over: Callable[[], bool] | None = None) -> None:
        """Lets everything happen that is due until then, or until ``is_over`` or somebody halts it."""
        due, soon = self._due, self._soon
        self.is_halted = False
        while not (self.is_halted or (is_over is not None and is_over())):
            if soon:
                self.events += 1
                soon.popleft()()
                continue
            if not due or due[0][0] > time_s:
                self.now = max(self.now, time_s) if time_s != float("inf") else self.now
                return
            now, turn, timer = heappop(due)
            action = timer.action
            if action is None:
                continue
            timer.action = None
            self.now, self.turn = now, turn
            self.events += 1
            action()
