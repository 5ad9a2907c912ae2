"""The cores of the one machine that a whole mesh runs on: passes of its instances share them with one another
and with all that is done beside passes: messages, streams, clients.

A pass keeps one core busy for as long as its model of performance says. What it brings about beside is given
in seconds of a core too, which are taken while it goes on. Where more is wanted than there are cores,
everyone gets on at the same pace (processor sharing), but for what gives way to others.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from common.errors import ConfigError

IDLE_CORE = 0.5


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[host]``: one machine of ``cores`` runs everything. Seconds of a core that are taken beside passes:
    by each pass ``pass_s``, by each token drawn ``token_s``, by each prompt, from its client to its first
    token, ``prompt_s``, and ``prompt_token_s`` by each of its tokens. ``idle_cores``: what is taken all the
    time. ``worker_cores``: what an attention worker takes while steps go on, computing or looking out for the
    next layer; of these, other engines' passes lack ``held_share`` alone, as one that looks out gives way to
    them. Whoever is woken has to get a core first: while no core is idle half of the time a message takes
    ``wake_s`` longer, and while more is wanted than there is, a layer whose attention a worker computes takes
    ``exchange_s``."""

    cores: int
    idle_cores: float = 0.0
    pass_s: float = 0.0
    token_s: float = 0.0
    prompt_s: float = 0.0
    prompt_token_s: float = 0.0
    worker_cores: float = 0.0
    held_share: float = 1.0
    wake_s: float = 0.0
    exchange_s: float = 0.0


def check_host(host: HostConfig) -> None:
    """Raises ConfigError."""
    if host.cores < 1:
        raise ConfigError("host.cores", host.cores, "must be at least 1")
    for key, value in msgspec.structs.asdict(host).items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"host.{key}", value, "must be 0 or more")
    if host.held_share > 1:
        raise ConfigError("host.held_share", host.held_share, "must be at most 1")
    if host.idle_cores >= host.cores:
        raise ConfigError("host.idle_cores", host.idle_cores, f"must be under host.cores = {host.cores}")


class Wanted(NamedTuple):
    """Cores; ``yielded``: of these, to whoever else wants them."""

    cores: float
    yielded: float


class Paced(Protocol):
    """Who computes on a host."""

    def change_pace(self) -> None:
        """The host's has changed."""
        ...


@dataclass(slots=True, eq=False)
class Host:
    """``pace``: seconds of work that a pass gets done in a second; ``yielding_pace``: that a step over
    attention workers does, whatever it yields. ``is_busy``: no core is idle half of the time."""

    config: HostConfig
    pace: float = 1.0
    yielding_pace: float = 1.0
    is_busy: bool = False
    _wanted: dict[Paced, Wanted] = field(default_factory=dict)

    def want(self, who: Paced, cores: float, yielded: float = 0.0) -> None:
        """From now on, of whoever computes; the others hear of it where that changes their pace."""
        if cores > 0:
            self._wanted[who] = Wanted(cores, yielded)
        elif self._wanted.pop(who, None) is None:
            return
        if self._settle():
            for other in list(self._wanted):
                if other is not who:
                    other.change_pace()

    def cores_for(self, pass_s: float, tokens: int, prompts: int, prompt_tokens: int) -> float:
        """What a pass of so many seconds takes with all that it brings about: tokens that it draws, prompts
        that it ends, prompts' tokens that it computes."""
        if pass_s <= 0:
            return 1.0
        config = self.config
        prompts_s = prompts * config.prompt_s + prompt_tokens * config.prompt_token_s
        return 1.0 + (config.pass_s + tokens * config.token_s + prompts_s) / pass_s

    @property
    def is_full(self) -> bool:
        """More is wanted than there is."""
        return self.yielding_pace < 1.0

    def _settle(self) -> bool:
        """By what is wanted now; whether a pace is another one."""
        before, wanted = (self.pace, self.yielding_pace), sum(each.cores for each in self._wanted.values())
        there = self.config.cores - self.config.idle_cores
        self.is_busy = there - wanted < IDLE_CORE
        self.yielding_pace = min(1.0, there / wanted) if wanted else 1.0
        held = wanted - sum(each.yielded for each in self._wanted.values())
        self.pace = there / held if held > there else 1.0
        return (self.pace, self.yielding_pace) != before


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
        if now <= self._begun_s[-1]:
            self._paces[-1] = pace
            return
        self._done_s.append(self.done_by(now))
        self._begun_s.append(now)
        self._paces.append(pace)

    def done_by(self, time_s: float) -> float:
        """Seconds of work."""
        piece = max(0, bisect_right(self._begun_s, time_s) - 1)
        return self._done_s[piece] + (time_s - self._begun_s[piece]) * self._paces[piece]

    def time_of(self, work_s: float) -> float:
        """When so much of it is done."""
        piece = max(0, bisect_right(self._done_s, work_s) - 1)
        return self._begun_s[piece] + (work_s - self._done_s[piece]) / self._paces[piece]
