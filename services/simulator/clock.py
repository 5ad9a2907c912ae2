"""Virtual time: what is due, in the order of its time, and of its scheduling where that is the same."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

Action = Callable[[], None]


class Timer(msgspec.Struct, eq=False):
    """``action`` None: it was cancelled, or has happened. ``turn``: among all that were scheduled."""

    due_s: float
    action: Action | None
    turn: int


@dataclass(slots=True)
class Clock:
    """``events``: how many things have happened. ``turn``: of what happens now, among all that were
    scheduled. ``is_halted``: nothing happens until it is let run again. ``_due``: when anything is, and
    ``_timers`` what, in the order of turns. ``_present``: those of a time that has come, and ``_next`` the
    place of the one that is next among them."""

    now: float = 0.0
    events: int = 0
    turn: int = 0
    is_halted: bool = False
    _due: list[float] = field(default_factory=list)
    _timers: dict[float, list[Timer]] = field(default_factory=dict)
    _present: list[Timer] = field(default_factory=list)
    _next: int = 0
    _soon: deque[Action] = field(default_factory=deque)
    _scheduled: int = 0

    def at(self, time_s: float, action: Action) -> Timer:
        """Never before now."""
        due_s = time_s if time_s > self.now else self.now
        self._scheduled += 1
        timer = Timer(due_s, action, self._scheduled)
        alike = self._timers.get(due_s)
        if alike is None:
            self._timers[due_s] = [timer]
            heappush(self._due, due_s)
        else:
            alike.append(timer)
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
            if self._next == len(self._present):
                if not due or due[0] > time_s:
                    self.now = max(self.now, time_s) if time_s != float("inf") else self.now
                    return
                self._begin(heappop(due))
            timer = self._following()
            action = timer.action
            if action is None:
                continue
            timer.action = None
            self.now, self.turn = timer.due_s, timer.turn
            self.events += 1
            action()

    def _following(self) -> Timer:
        """Of the present ones the next that was not cancelled, or the last: before that nobody else has a
        say, as it is not ``now`` yet."""
        while True:
            timer = self._present[self._next]
            self._next += 1
            if timer.action is not None or self._next == len(self._present):
                return timer

    def _begin(self, due_s: float) -> None:
        """With what is due then. What is scheduled for that time from now on comes after it."""
        self._present, self._next = self._timers.pop(due_s), 0
