"""Drives a search to its end: simulates what it asks for, in a process a core, and keeps every point."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from queue import SimpleQueue
from typing import Protocol, TypeVar

from services.planner.checkpoint import Checkpoint
from services.planner.probes import Point, Probe, Search, key_maker
from services.planner.simulating import Conditions, run_probe

Found = TypeVar("Found")


class Simulator(Protocol):
    """``places``: so many probes at once."""

    places: int

    def begin(self, probe: Probe) -> None:
        """There is a place."""
        ...

    def wait(self) -> tuple[Probe, Point]:
        """Any one that was begun, when it is over. Raises what its run raises."""
        ...


@dataclass(slots=True)
class Here:
    """In this process, one after the other."""

    run: Callable[[Probe], Point]
    places: int = 1
    _begun: list[Probe] = field(default_factory=list)

    def begin(self, probe: Probe) -> None:
        self._begun.append(probe)

    def wait(self) -> tuple[Probe, Point]:
        probe = self._begun.pop()
        return probe, self.run(probe)


@dataclass(slots=True)
class Apart:
    """In a pool's processes."""

    pool: Pool
    places: int
    _over: SimpleQueue[tuple[Probe, Point] | BaseException] = field(default_factory=SimpleQueue)

    def begin(self, probe: Probe) -> None:
        self.pool.apply_async(_work, (probe,), callback=self._over.put, error_callback=self._over.put)

    def wait(self) -> tuple[Probe, Point]:
        over = self._over.get()
        if isinstance(over, BaseException):
            raise over
        return over


_conditions: Conditions | None = None


def _start_worker(conditions: Conditions) -> None:
    """In a group of its own: who tells the whole plan to end tells this one's parent, and a worker that ends
    by itself while it holds the lock of their queue would stop everybody."""
    global _conditions
    os.setpgid(0, 0)
    _conditions = conditions


def _work(probe: Probe) -> tuple[Probe, Point]:
    if _conditions is None:
        raise RuntimeError("a worker was not started")
    return probe, run_probe(probe, _conditions)


@contextmanager
def simulating(conditions: Conditions, processes: int) -> Iterator[Simulator]:
    """With one process it runs in this one."""
    if processes <= 1:
        yield Here(lambda probe: run_probe(probe, conditions))
        return
    context = multiprocessing.get_context("spawn")
    # Ctrl-C is this process's to answer: it keeps what is done and ends its workers, which inherit this.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        workers = context.Pool(processes, _start_worker, (conditions,))
    finally:
        signal.signal(signal.SIGINT, answer)
    with workers as pool:
        yield Apart(pool, processes)


def drive(
    search: Search[Found],
    simulator: Simulator,
    checkpoint: Checkpoint,
    context: bytes,
    progress: Callable[[Probe], None] = lambda _: None,
) -> Found:
    """What the search found. ``progress`` is told of every probe that is simulated."""
    key_of, keys = key_maker(context), dict[Probe, str]()
    running: set[Probe] = set()
    points: dict[Probe, Point] | None = None
    while True:
        try:
            probes = next(search) if points is None else search.send(points)
        except StopIteration as end:
            found: Found = end.value
            return found
        for probe in probes:
            if probe not in keys:
                keys[probe] = key_of(probe)
        points = {probe: kept for probe in probes if (kept := checkpoint.points.get(keys[probe]))}
        if not points:
            # The longest first, so that no core waits for it at the end.
            missing = [probe for probe in probes if probe not in running]
            missing.sort(key=lambda probe: -probe.requests)
            for probe in missing[: simulator.places - len(running)]:
                simulator.begin(probe)
                running.add(probe)
            probe, point = simulator.wait()
            running.remove(probe)
            checkpoint.keep(keys[probe], point)
            progress(probe)
            points = {probe: point}
