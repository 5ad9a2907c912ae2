"""When an instance reports its load: every interval, and soon after a change (TetriInfer 3.2)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LoadReporter:
    """``interval_s`` is the longest silence; changes closer together than ``gap_s`` share one report."""

    interval_s: float
    gap_s: float
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note_change(self) -> None:
        self._changed.set()

    async def run(self, publish: Callable[[], None]) -> None:
        """``publish`` makes and sends one report. Runs until cancelled."""
        while True:
            self._changed.clear()
            publish()
            await asyncio.sleep(min(self.gap_s, self.interval_s))
            try:
                async with asyncio.timeout(max(0.0, self.interval_s - self.gap_s)):
                    await self._changed.wait()
            except TimeoutError:
                continue
