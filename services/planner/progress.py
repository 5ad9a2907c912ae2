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
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY_S = 30.0
"""A line where there is no terminal."""


class Watch:
    """A search tells it what it counts (``tell``), its driver of each run (``ran``). ``size``: said once, as
    the search begins to count."""

    def __init__(self, console: Console, size: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.runs = 0
        self._console, self._size, self._clock = console, size, clock
        self._what, self._done, self._total = "", 0, 0
        self._said_s = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def tell(self, what: str, done: int, total: int) -> None:
        """A ``services.planner.probes.Tell``."""
        if not self._what:
            self._say(self._size)
        if what != self._what:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)
        self._what, self._done, self._total = what, done, total
        self._show()

    def ran(self) -> None:
        self.runs += 1
        self._show()

    def _show(self) -> None:
        if self._task is not None:
            description = f"planning: {self.runs} runs, {self._what}"
            self._bar.update(self._task, description=description, completed=self._done)
        if not self._console.is_terminal and self._clock() - self._said_s >= EVERY_S:
            self._say(f"planning: {self.runs} runs, {self._done} of {self._total} {self._what}")

    def _say(self, line: str) -> None:
        self._said_s = self._clock()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
