"""Times passes on an engine, and finds out which of them there is room for."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from common.model.device import OutOfMemory, free_unused_memory
from common.steps import SequenceStep
from services.hosts.engines import Engine
from services.profiling.passes import Case, Shared, has_room, pass_of

BRIEF_S = 0.2
"""What follows in size on a pass that takes no longer is measured, too: accelerators need large ones to be
kept busy, which would take a processor minutes."""
COLD_S = 1.0
"""Up to so long a first pass may have been cold: how brief it is a second one says."""


class PassWatch:
    """Times passes, each made once, on the engine's own thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._passes: dict[Shared, list[SequenceStep]] = {}

    async def time(self, case: Shared) -> float:
        return await self._engine.thread.run(_time, self._engine, self._batch(case), self._clock)

    async def first(self, case: Shared) -> float | None:
        """As those to come will be. None: there is no room for its KV, or for what is between layers."""
        if not has_room(self._engine, case):
            return None
        try:
            while not self._engine.is_settled(self._batch(case)):
                await self.time(case)
            return await self.time(case)
        except OutOfMemory:
            free_unused_memory()
            return None

    async def grown(
        self,
        cases: Sequence[Case],
        larger: Callable[[Case], Iterable[Case]],
        whole: Callable[[Case], Shared],
    ) -> dict[Case, float]:
        """How long these take for which there is room, and those beyond them of which the next smaller one is
        brief."""
        found: dict[Case, float] = {}
        seen, waiting = set(cases), deque(cases)
        while waiting:
            case = waiting.popleft()
            seconds = await self.first(whole(case))
            if seconds is None:
                continue
            beyond = [each for each in larger(case) if each not in seen]
            if beyond and BRIEF_S < seconds <= COLD_S:
                seconds = min(seconds, await self.time(whole(case)))
            found[case] = seconds
            if seconds <= BRIEF_S:
                seen.update(beyond)
                waiting += beyond
        return found

    def _batch(self, case: Shared) -> list[SequenceStep]:
        if case not in self._passes:
            self._passes[case] = pass_of(self._engine, case)
        return self._passes[case]


def _time(engine: Engine, batch: list[SequenceStep], clock: Callable[[], float]) -> float:
    began_s = clock()
    engine.runner.run(batch)
    return clock() - began_s
