"""When an instance reports its load: every interval, and soon after a change (TetriInfer 3.2)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

MIN_GAP_S = 0.02
"""Changes closer together than this share one report."""


@dataclass(slots=True)
class LoadReporter:
    """``interval_s`` is the longest silence."""

    interval_s: float
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note_change(self) -> None:
        self._changed.set()

    async def run(self, publish: Callable[[], None]) -> None:
        """``publish`` makes and sends one report. Runs until cancelled."""
        while True:
            self._changed.clear()
            publish()
            await asyncio.sleep(min(MIN_GAP_S, self.interval_s))
            try:
                async with asyncio.timeout(max(0.0, self.interval_s - MIN_GAP_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue
