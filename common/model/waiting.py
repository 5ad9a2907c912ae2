"""How, and for how long, to look for what comes through shared memory: awake while it usually comes soon and
nobody else wants the core; then asleep."""

import os
import time
from collections.abc import Callable

from common.bell import Bells
from common.errors import ServiceError
from common.exchange_shape import RecordPlace

SPINS = 20
"""Some microseconds. What waits longer offers its core at every look."""
YIELD_S = 0.0005
LATE_S, WANTED_S = 0.0002, 0.05
"""A yield that comes back so late says that somebody else wants the core, and probably for so long yet."""
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 0.00005, 0.001
IDLE_S, IDLE_SLEEP_S = 1.0, 0.005
"""Who has had nothing to do for so long may begin a little late, and leaves the core in peace meanwhile."""
LONG_WAIT_S, USUAL_WEIGHT = 0.01, 0.1
"""A wait beyond the first is a pause between steps, and says nothing of the next layer's."""
LOOKS_PER_CHECK = 16
"""Sleeps between two looks at the clock and at whether the peer is still there."""


class PeerSilent(ServiceError):
    """The other side of an exchange did not answer in time, or is gone."""


class Waiting:
    """Of one thread: spins, then yields the core, then sleeps ever longer, or until a bell rings.

    The yielding lasts twice as long as the last waits took, within bounds: what usually comes soon is met
    awake, and nobody burns a core for what does not. Where a yield comes back late the core is wanted by
    others: who hears a bell sleeps at once for a while from then on (``common.bell`` has why that is sooner).
    """

    def __init__(self) -> None:
        self._usual_s = 0.0
        self._wanted_until_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._looks = 0
        self._began_s = 0.0
        self._sleep_s = SHORTEST_SLEEP_S
        self._is_sleeping = False

    def restart(self) -> None:
        """What was waited for has come."""
        waited_s = self.waited_s
        if waited_s < LONG_WAIT_S:
            self._usual_s += USUAL_WEIGHT * (waited_s - self._usual_s)
        self._clear()

    @property
    def waited_s(self) -> float:
        """Since the spinning ended; 0 before."""
        return time.monotonic() - self._began_s if self._began_s else 0.0

    def pause(self, bells: Bells | None = None) -> bool:
        """Between two looks at what the bells tell of. True now and then: time to ask whether the peer is
        still there."""
        self._looks += 1
        if self._looks < SPINS:
            return False
        now_s = time.monotonic()
        if not self._began_s:
            self._began_s = now_s
        if not self._is_sleeping and (bells is None or now_s >= self._wanted_until_s):
            self._yield(now_s)
            return False
        longest_s = LONGEST_SLEEP_S if now_s - self._began_s < IDLE_S else IDLE_SLEEP_S
        if bells is not None:
            bells.wait(longest_s)
            bells.listen()
        else:
            time.sleep(self._sleep_s)
            self._sleep_s = min(1.5 * self._sleep_s, longest_s)
        return self._looks % LOOKS_PER_CHECK == 0

    def _yield(self, now_s: float) -> None:
        self._is_sleeping = now_s - self._began_s > max(YIELD_S, 2 * self._usual_s)
        os.sched_yield()
        back_s = time.monotonic()
        if back_s - now_s > LATE_S:
            self._wanted_until_s = back_s + WANTED_S


def wait_until(
    has_come: Callable[[RecordPlace, int], bool],
    place: RecordPlace,
    number: int,
    waiting: Waiting,
    timeout_s: float,
    is_gone: Callable[[], bool],
    bells: Bells | None = None,
) -> None:
    """Until the record at ``place`` has come with that number, which these bells tell of.

    Raises PeerSilent after ``timeout_s``, or when ``is_gone`` says that nobody will answer."""
    while not has_come(place, number):
        if not waiting.pause(bells):
            continue
        if is_gone():
            raise PeerSilent("the other side of the exchange is gone")
        if waiting.waited_s > timeout_s:
            raise PeerSilent(f"the other side of the exchange has not answered for {waiting.waited_s:.1f} s")
    waiting.restart()
