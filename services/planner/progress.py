"""What a plan says of itself while it searches: a bar in a terminal, elsewhere a line now and then."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

EVERY_S = 30.0
"""At least, between two lines where there is no terminal: as runs end."""


class Watch:
    """A search tells it what it counts (``tell``), its driver of each run (``ran``). ``size`` is said as it
    begins."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = ""
        self.runs = 0
        self._console, self._clock = console, clock
        self._what, self._done, self._total = "", 0, 0
        self._said_s = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("planning", total=None)

    def tell(self, what: str, done: int, total: int) -> None:
        """A ``services.planner.probes.Tell``."""
        if what != self._what:
            self._bar.reset(self._task)
        self._what, self._done, self._total = what, done, total
        self._show()

    def ran(self) -> None:
        self.runs += 1
        self._show()

    def _show(self) -> None:
        runs = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        described = f"planning: {runs}, {self._what}" if self._what else f"planning: {runs}"
        total = self._total if self._what else None
        self._bar.update(self._task, description=described, completed=self._done, total=total)
        if not self._console.is_terminal and self._clock() - self._said_s >= EVERY_S:
            counted = f", {self._done} of {self._total} {self._what}" if self._what else ""
            self._say(f"planning: {runs}{counted}")

    def _say(self, line: str) -> None:
        self._said_s = self._clock()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._say(self.size)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
