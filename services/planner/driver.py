"""Drives a search to its end: simulates what it asks for, in a process a core, and keeps every point."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Protocol, TypeVar

from common.errors import ServiceError
from services.launcher.tied import tie_to
from services.planner.checkpoint import Checkpoint
from services.planner.probes import Point, Probe, Search, key_maker
from services.planner.simulating import Conditions, run_probe

Found = TypeVar("Found")

LOST = (
    "a process of this plan was lost (killed, or short of memory?): fewer --processes take less, and with"
    " --checkpoint it goes on where it was"
)


class WorkerLost(ServiceError):
    """A process that simulates ended, and not by an error of its run."""


class Simulator(Protocol):
    """``places``: so many probes at once."""

    places: int

    def begin(self, probe: Probe) -> None:
        """There is a place."""
        ...

    def wait(self) -> tuple[Probe, Point]:
        """Any one that was begun, when it is over. Raises what its run raises, or WorkerLost."""
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
    """In an executor's processes."""

    executor: Executor
    places: int
    _begun: dict[Future[Point], Probe] = field(default_factory=dict)

    def begin(self, probe: Probe) -> None:
        try:
            self._begun[self.executor.submit(_work, probe)] = probe
        except BrokenProcessPool as exc:
            raise WorkerLost(LOST) from exc

    def wait(self) -> tuple[Probe, Point]:
        over, _ = wait(self._begun, return_when=FIRST_COMPLETED)
        # What has come is not lost to an error beside it.
        first = min(over, key=lambda each: each.exception() is not None)
        probe = self._begun.pop(first)
        try:
            return probe, first.result()
        except BrokenProcessPool as exc:
            raise WorkerLost(LOST) from exc


_conditions: Conditions | None = None
_all_started: Barrier | None = None


def _start_worker(conditions: Conditions, all_started: Barrier) -> None:
    """In a group of its own: who tells the whole plan to end tells this one's parent. With that it ends, also
    where nobody was told."""
    global _conditions, _all_started
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        tie_to(parent.pid)
    os.setpgid(0, 0)
    _conditions, _all_started = conditions, all_started


def _wait_for_the_others() -> None:
    assert _all_started is not None, "a worker was started"
    _all_started.wait()


def _work(probe: Probe) -> Point:
    if _conditions is None:
        raise RuntimeError("a worker was not started")
    return run_probe(probe, _conditions)


@contextmanager
def simulating(conditions: Conditions, processes: int) -> Iterator[Simulator]:
    """With one process it runs in this one."""
    if processes <= 1:
        yield Here(lambda probe: run_probe(probe, conditions))
        return
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(processes, spawn, _start_worker, (conditions, spawn.Barrier(processes)))
    # Ctrl-C is this process's to answer: it keeps what is done and ends its workers, which inherit that they
    # do not hear it. A worker is started by work that no other one is free for.
    answered = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(processes):
            executor.submit(_wait_for_the_others)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, answered)
    workers = set(multiprocessing.active_children()) - others
    try:
        yield Apart(executor, processes)
    finally:
        # A run under way may take a minute yet.
        for worker in workers:
            worker.terminate()
        executor.shutdown(cancel_futures=True)


def drive(
    search: Search[Found],
    simulator: Simulator,
    checkpoint: Checkpoint,
    context: bytes,
    progress: Callable[[Probe], None] = lambda _: None,
) -> Found:
    """What the search found. ``progress`` is told of every probe that is simulated. Raises what a run raises,
    or WorkerLost; ValueError for a search that waits for nothing."""
    key_of, keys = key_maker(context), dict[Probe, str]()
    running: set[Probe] = set()
    points: dict[Probe, Point] | None = None
    while True:
        try:
            probes = next(search) if points is None else search.send(points)
        except StopIteration as end:
            found: Found = end.value
            return found
        if not probes:
            raise ValueError("a search that goes on waits for one probe at least")
        for probe in probes:
            if probe not in keys:
                keys[probe] = key_of(probe)
        points = {probe: kept for probe in probes if (kept := checkpoint.points.get(keys[probe]))}
        if not points:
            # The longest first, so that no core waits for it at the end.
            missing = [probe for probe in dict.fromkeys(probes) if probe not in running]
            missing.sort(key=lambda probe: -probe.requests)
            for probe in missing[: simulator.places - len(running)]:
                simulator.begin(probe)
                running.add(probe)
            probe, point = simulator.wait()
            running.remove(probe)
            checkpoint.keep(keys[probe], point)
            progress(probe)
            points = {probe: point}
