"""One simulated run of a deployment at a rate: what is asked, and what came of it.

A search is a generator of the probes that it waits for, and is sent points of some of them as they come: it
decides, and whoever drives it (``services.planner.driver``) simulates, in as many processes as there are, and
keeps points for the next time. What each part of it decides hangs on its own points alone, so it is the same
on one core and on many, whichever of them come first.
"""

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from services.planner.candidates import Deployment, PoolPlan

Phase = Literal["whole", "prefill", "decode"]
Found = TypeVar("Found")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """``requests`` of the trace, evenly spaced in it, at ``rate_per_s``. ``phase``: of one alone, the other
    takes no time (DistServe's simu_prefill and simu_decode)."""

    pools: tuple[PoolPlan, ...]
    rate_per_s: float
    requests: int
    phase: Phase = "whole"

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.pools)


class PoolPoint(msgspec.Struct, frozen=True):
    """Of a pool: shares of the run's time, the largest share of one instance's KV that was used.
    ``attention_busy``: of its attention workers, where it has some."""

    busy: float
    batch: float
    kv_peak: float
    preempted: int
    attention_busy: float = 0.0


class Point(msgspec.Struct, frozen=True):
    """Shares are of all requests. Percentiles (50, 90, 99) in seconds; none where nothing ended.
    ``left_share``: of those who came in the run's middle half, how many more were there in its last quarter
    than in its second, beyond chance: over 0 says that it cannot keep up, whatever objectives it keeps.
    ``slowdowns``: how many times as long as alone on the reference, where there is one: TTFT, TBT (a
    request's mean) and end to end, each at its 50th, 90th and 99th percentile."""

    attainment: float
    ttft_share: float
    tpot_share: float
    other_share: float
    done_share: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    end_to_end_s: tuple[float, ...]
    tbt_s: tuple[float, ...]
    queue_p99_s: float | None
    slowdowns: tuple[float, ...]
    left_share: float
    mean_w: float | None
    pools: tuple[PoolPoint, ...]


Search = Generator[Sequence[Probe], Mapping[Probe, Point], Found]
"""It yields all that it waits for, one probe at least; is sent one of their points at least, and yields again
what it still waits for."""
Tell = Callable[[str, int, int], None]
"""Of a search while it goes on: what it counts, how many of these are over, and of how many."""


def untold(what: str, done: int, total: int) -> None:
    """A Tell that nobody hears."""


@dataclass(slots=True)
class Tally:
    """Of one part of a search: tells as it begins, and whenever more is over."""

    tell: Tell
    what: str
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.tell(self.what, self.done, self.total)

    def add(self, count: int = 1) -> None:
        self.done += count
        self.tell(self.what, self.done, self.total)


def together(searches: Sequence[Search[Found]], over: Tally | None = None) -> Search[list[Found]]:
    """All at once: each goes on as soon as points of its own come, whatever the others wait for. ``over``
    counts those that ended."""
    found: dict[int, Found] = {}
    waiting: dict[int, Sequence[Probe]] = {}

    def advance(number: int, points: Mapping[Probe, Point] | None) -> None:
        search = searches[number]
        try:
            waiting[number] = next(search) if points is None else search.send(points)
        except StopIteration as end:
            waiting.pop(number, None)
            found[number] = end.value
            if over is not None:
                over.add()

    for number in range(len(searches)):
        advance(number, None)
    while waiting:
        points = yield list(dict.fromkeys(probe for probes in waiting.values() for probe in probes))
        for number, probes in list(waiting.items()):
            if own := {probe: points[probe] for probe in probes if probe in points}:
                advance(number, own)
    return [found[number] for number in range(len(searches))]


def ask(probe: Probe) -> Search[Point]:
    points = yield [probe]
    return points[probe]


def key_maker(context: bytes) -> Callable[[Probe], str]:
    """Makes keys that are equal for equal runs. ``context``: all else that they hang on, a whole trace long,
    which is read once."""
    begun = hashlib.sha256(context)

    def key_of(probe: Probe) -> str:
        digest = begun.copy()
        digest.update(msgspec.json.encode(probe))
        return digest.hexdigest()

    return key_of
