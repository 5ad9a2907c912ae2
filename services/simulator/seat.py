"""Where an instance sits on a host (``services.simulator.host``): its passes, and what prompts bring about
beside them.

Messages wake processes for a few tenths of a millisecond each, on the core on which these ran last, which
an engine has taken since. Of prompts of 15 tokens, beside steps of one sequence on two cores, who computed
them waited for a core 17 % of the time, 5 ms of each, and who decoded 3 % (measured on a Zen 5, by what the
system's scheduler counts). So what a prompt brings about is taken of the core of whoever computes it, or
decodes it, and not of all alike. Over attention workers who decodes is no engine of its own here, but shares
a pace with others: there it is taken as by one process more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.simulator.host import Host, PacedWork, Wanted

OF_ARRIVAL = 0.5
"""Of what a prompt takes beside passes, until it is with who computes it: 2.4 ms of a core from its client to
its engine, and as much for its first token and hand-over (measured on a Zen 5, from processor times before,
amid and after a long pass)."""


def _tell_nobody() -> None:
    """Nothing is computed there."""


@dataclass(slots=True, eq=False)
class Seat:
    """An instance's on a host. What prompts bring about is done on the core of who computes them, while no
    other one is idle: with it, an engine gets as much as others do. What passes and their tokens bring about
    is done on any. ``on_change``: its pace is another one. ``waited_s``: how long passes have been without a
    core."""

    host: Host
    on_change: Callable[[], None] = _tell_nobody
    waited_s: float = 0.0
    _without: float = 0.0
    _since_s: float = 0.0
    _engine: float = 0.0
    _beside: float = 0.0
    _passes_per_s: float = 0.0
    _errands: "list[_Errand]" = field(default_factory=list)

    def begin(self, pass_s: float, tokens: int, prompt_tokens: int) -> None:
        """A pass of so many seconds, or steps each of which takes as long, by which so many tokens are
        drawn, and so many of prompts computed."""
        self._engine, self._beside, self._passes_per_s = 1.0, 0.0, 0.0
        if pass_s > 0:
            self._beside = self.host.beside_s(tokens, prompt_tokens) / pass_s
            self._passes_per_s = 1.0 / pass_s
        self._want()

    def end(self) -> None:
        """Of what was computed."""
        self._engine = self._beside = self._passes_per_s = 0.0
        self._want()

    def leave(self) -> None:
        """Nobody is there any more."""
        for errand in self._errands:
            errand.cancel()
        self._errands.clear()
        self.end()

    def take_prompt(self) -> None:
        """One comes to be computed."""
        self._take(OF_ARRIVAL * self.host.config.prompt_s)

    def take_sequence(self) -> None:
        """One comes to be decoded, or is offered."""
        self._take((1.0 - OF_ARRIVAL) * self.host.config.prompt_s)

    def pace_of(self, pass_s: float) -> float:
        """Seconds of work that get done in a second of passes that take so long alone."""
        return self.host.pace_of(self, pass_s, self._own)

    def change_pace(self) -> None:
        self._count_wait()
        self._pace_errands()
        if self._engine:
            self.on_change()

    def remove(self, errand: "_Errand") -> None:
        self._errands.remove(errand)
        self._settle()

    @property
    def _own(self) -> float:
        return self._engine + len(self._errands)

    def _take(self, core_s: float) -> None:
        if core_s > 0:
            self._errands.append(_Errand(self, core_s))
            self._settle()

    def _settle(self) -> None:
        self._want()
        if self._engine:
            self.on_change()

    def _want(self) -> None:
        own = self._own
        wanted = [Wanted(own + self._beside, own)] if own else []
        self.host.want(self, *wanted, passes_per_s=self._passes_per_s)
        self._count_wait()
        self._pace_errands()

    def _count_wait(self) -> None:
        """Up to now at the pace that was; from now on at what it is."""
        now = self.host.clock.now
        self.waited_s += self._without * (now - self._since_s)
        self._since_s = now
        self._without = 1.0 - self.host.pace(self._own) if self._engine else 0.0

    def _pace_errands(self) -> None:
        for errand in self._errands:
            errand.change_pace(self.host.pace(self._own))


class _Errand:
    """Work of one thread that takes a core for so long, or a part of one for longer."""

    def __init__(self, seat: Seat, core_s: float) -> None:
        self._seat, self._core_s, self._pace = seat, core_s, 1.0
        self._work = PacedWork(seat.host.clock.now, 1.0)
        self._timer = seat.host.clock.after(core_s, self._end)

    def change_pace(self, pace: float) -> None:
        if pace == self._pace:
            return
        self._pace, clock = pace, self._seat.host.clock
        self._work.change_pace(clock.now, pace)
        clock.cancel(self._timer)
        self._timer = clock.at(self._work.time_of(self._core_s), self._end)

    def cancel(self) -> None:
        self._seat.host.clock.cancel(self._timer)

    def _end(self) -> None:
        self._seat.remove(self)
