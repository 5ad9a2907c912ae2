"""How long the operators of a row take, one after the other: a mark after each.

On the host a lap ends when the call returns. On a CUDA device it lies between two events of the stream: what
the device waits there for the host's next launch is in it, as it is in a pass that launches each operator.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import torch

MS_A_NS = 1e-6
Mark = TypeVar("Mark")


class Laps(Protocol):
    def begin(self) -> None:
        """A layer, or what else is one run of some operators."""

    def mark(self, operator: str | None) -> None:
        """What came since the mark before was ``operator``; None: nothing that counts."""

    def taken_ms(self) -> list[dict[str, float]]:
        """Of each run its operators, those that it has twice with the sum. Waits for the device, and forgets
        all runs."""


class Marks(Generic[Mark]):
    """Of runs: when each began, and what was over when."""

    def __init__(self) -> None:
        self._runs: list[tuple[Mark, list[tuple[str | None, Mark]]]] = []

    def begin(self, mark: Mark) -> None:
        self._runs.append((mark, []))

    def add(self, operator: str | None, mark: Mark) -> None:
        self._runs[-1][1].append((operator, mark))

    def take(self) -> list[list[tuple[str, Mark, Mark]]]:
        """(operator, when it began, when it was over) of each run."""
        runs, self._runs = self._runs, []
        laps = []
        for began, marks in runs:
            begins = [began, *(mark for _, mark in marks)]
            pairs = zip(begins, marks, strict=False)
            laps.append([(name, begin, end) for begin, (name, end) in pairs if name is not None])
        return laps


class HostLaps:
    """``clock``: in ns."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._marks: Marks[int] = Marks()

    def begin(self) -> None:
        self._marks.begin(self._clock())

    def mark(self, operator: str | None) -> None:
        self._marks.add(operator, self._clock())

    def taken_ms(self) -> list[dict[str, float]]:
        runs = self._marks.take()
        return [_sums((name, MS_A_NS * (end - begin)) for name, begin, end in run) for run in runs]


class CudaLaps:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: Marks[torch.cuda.Event] = Marks()

    def begin(self) -> None:
        self._marks.begin(self._event())

    def mark(self, operator: str | None) -> None:
        self._marks.add(operator, self._event())

    def taken_ms(self) -> list[dict[str, float]]:
        torch.cuda.synchronize(self._device)
        runs = self._marks.take()
        return [_sums((name, begin.elapsed_time(end)) for name, begin, end in run) for run in runs]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def laps_on(device: torch.device) -> Laps:
    return CudaLaps(device) if device.type == "cuda" else HostLaps()


def statistics_of(operator: str, taken_ms: list[float]) -> dict[str, float]:
    """As Vidur's profiler names its columns."""
    each = {
        "min": min(taken_ms),
        "max": max(taken_ms),
        "mean": statistics.fmean(taken_ms),
        "median": statistics.median(taken_ms),
        "std": statistics.pstdev(taken_ms),
    }
    return {f"time_stats.{operator}.{name}": value for name, value in each.items()}


def _sums(laps: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for operator, ms in laps:
        sums[operator] += ms
    return dict(sums)
