"""A clock that only the test moves."""

import asyncio
import heapq
import itertools


class VirtualTime:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._fell_asleep = asyncio.Condition()

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        async with self._fell_asleep:
            heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._order), awake))
            self._fell_asleep.notify_all()
        await awake.wait()

    async def wait_for_sleepers(self, count: int) -> None:
        """Returns when ``count`` tasks sleep."""
        async with self._fell_asleep:
            await self._fell_asleep.wait_for(lambda: len(self._sleepers) >= count)

    def advance(self, seconds: float) -> None:
        """Moves time on and wakes whoever is due."""
        self.now_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self.now_s:
            heapq.heappop(self._sleepers)[2].set()
