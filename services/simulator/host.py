"""The cores of the one machine that a whole mesh runs on: passes of its instances share them with one another
and with all that is done beside passes: messages, streams, clients.

A pass keeps one core busy for as long as its model of performance says. What it brings about beside is given
in seconds of a core too, which are taken while it goes on. Where more is wanted than there are cores, they
are shared as by a fair scheduler (max-min fairness): who computes all the time gets as much as others who do,
and who is woken for less than that gets what it wants. Cores have one memory between them: a pass takes
longer while others compute, and the more passes they compute the more (contention for its bandwidth:
``services.profiling.contention``).
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from services.simulator.clock import Clock, Timer
from services.simulator.host_config import HostConfig

ROUNDING = 1e-9


class Wanted(NamedTuple):
    """So many ``cores``, by threads each of which takes ``thread`` of one if it can."""

    cores: float
    thread: float = 1.0


class Longer(NamedTuple):
    """A pass takes ``more_s`` seconds longer than alone, and ``share`` of what it takes then."""

    more_s: float
    share: float


NO_LONGER = Longer(0.0, 0.0)


class Paced(Protocol):
    """Who computes on a host."""

    def change_pace(self) -> None:
        """The host's has changed, or who computes beside."""
        ...


@dataclass(slots=True, eq=False)
class Host:
    """``level``: of a core, that no thread gets more of while more is wanted than there is. ``is_short``:
    more is wanted than there is, or was not long ago, as ``turns_hold_s`` has it."""

    config: HostConfig
    clock: Clock
    level: float = math.inf
    is_short: bool = False
    _hold_end: Timer | None = None
    _wanted: dict[Paced, tuple[Wanted, ...]] = field(default_factory=dict)
    _passes_per_s: dict[Paced, float] = field(default_factory=dict)
    _is_contended: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_contended = self.config.beside_s_per_rate > 0 or self.config.beside_share > 0

    def want(self, who: Paced, *wanted: Wanted, passes_per_s: float = 0.0) -> None:
        """From now on, of whoever would compute so many passes a second alone; the others hear of it where
        that changes their pace."""
        before = self._passes_per_s.get(who)
        if wanted:
            self._wanted[who] = wanted
        elif self._wanted.pop(who, None) is None:
            return
        if wanted and passes_per_s > 0:
            self._passes_per_s[who] = passes_per_s
        else:
            self._passes_per_s.pop(who, None)
        is_other_neighbour = self._is_contended and self._passes_per_s.get(who) != before
        if self._settle() or is_other_neighbour:
            for other in list(self._wanted):
                if other is not who:
                    other.change_pace()

    def pace(self, thread: float = 1.0) -> float:
        """Seconds of work that a thread which would take so much of a core gets done in a second."""
        return min(1.0, self.level / thread) if thread > 0 else 1.0

    def pace_of(self, who: Paced, pass_s: float, thread: float = 1.0) -> float:
        """Seconds of work that ``who`` gets done in a second of passes that take so long alone."""
        if not self._is_contended or pass_s <= 0:
            return self.pace(thread)
        longer = self.longer_for(who)
        return self.pace(thread) / (1.0 + longer.share + longer.more_s / pass_s)

    def longer_for(self, who: Paced) -> Longer:
        """Beside all the others that compute: each as it would alone, as much of the time as the other cores
        have for it while ``who`` has one."""
        if not self._is_contended or len(self._passes_per_s) < 2:
            return NO_LONGER
        config, others = self.config, [each for other, each in self._passes_per_s.items() if other is not who]
        beside = min(1.0, (config.cores - 1) / len(others))
        return Longer(
            beside * sum(others) * config.beside_s_per_rate, beside * len(others) * config.beside_share
        )

    def beside_s(self, tokens: int, prompt_tokens: int = 0) -> float:
        """Seconds of a core that a pass brings about, wherever there is one: that draws so many tokens, and
        computes so many of prompts."""
        config = self.config
        return config.pass_s + tokens * config.token_s + prompt_tokens * config.prompt_token_s

    def level_if(self, who: Paced, wanted: Wanted) -> float:
        """The level, were that what ``who`` wants."""
        there = self.config.cores - self.config.idle_cores
        others = [each for other, wants in self._wanted.items() if other is not who for each in wants]
        return min(1.0, _level(there, [*others, wanted] if wanted.cores > 0 else others))

    @property
    def is_full(self) -> bool:
        """More is wanted than there is."""
        return self.level < math.inf

    def _settle(self) -> bool:
        """By what is wanted now; whether the level is another one."""
        before, there = self.level, self.config.cores - self.config.idle_cores
        wanted = [each for wants in self._wanted.values() for each in wants]
        self.level = _level(there, wanted)
        self._settle_hold()
        return self.level != before

    def _settle_hold(self) -> None:
        held_s = self.config.turns_hold_s
        if self.is_full or not held_s:
            self.is_short = self.is_full
            if self._hold_end is not None:
                self.clock.cancel(self._hold_end)
                self._hold_end = None
        elif self.is_short and self._hold_end is None:
            self._hold_end = self.clock.after(held_s, self._end_hold)

    def _end_hold(self) -> None:
        self._hold_end, self.is_short = None, False
        for other in list(self._wanted):
            other.change_pace()


def _level(there: float, wanted: list[Wanted]) -> float:
    """At which all together take the cores that are there."""
    wanted.sort(key=lambda each: each.thread)
    for index, each in enumerate(wanted):
        level = there / sum(other.cores / other.thread for other in wanted[index:])
        if level < each.thread * (1 - ROUNDING):
            return level
        there -= each.cores
    return math.inf


class PacedWork:
    """Work that gets on at a pace that changes: pieces, each with when it began, what was done then, and its
    pace."""

    __slots__ = ("_begun_s", "_done_s", "_paces")

    def __init__(self, began_s: float, pace: float) -> None:
        self._begun_s = [began_s]
        self._done_s = [0.0]
        self._paces = [pace]

    def change_pace(self, now: float, pace: float) -> None:
        """Never before the last change."""
        if pace == self._paces[-1]:
            return
        if now <= self._begun_s[-1]:
            self._paces[-1] = pace
            return
        self._done_s.append(self.done_by(now))
        self._begun_s.append(now)
        self._paces.append(pace)

    def after(self, time_s: float) -> "PacedWork":
        """Work that began then, at this one's paces since."""
        piece = max(0, bisect_right(self._begun_s, time_s) - 1)
        rest = PacedWork(time_s, self._paces[piece])
        for begun_s, pace in zip(self._begun_s[piece + 1 :], self._paces[piece + 1 :], strict=True):
            rest.change_pace(begun_s, pace)
        return rest

    def done_by(self, time_s: float) -> float:
        """Seconds of work."""
        piece = max(0, bisect_right(self._begun_s, time_s) - 1)
        return self._done_s[piece] + (time_s - self._begun_s[piece]) * self._paces[piece]

    def time_of(self, work_s: float) -> float:
        """When so much of it is done."""
        piece = max(0, bisect_right(self._done_s, work_s) - 1)
        return self._begun_s[piece] + (work_s - self._done_s[piece]) / self._paces[piece]
