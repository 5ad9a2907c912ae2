"""Drives a search to its end: simulates what it asks for, in a process a core, and keeps every point."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from services.planner.checkpoint import Checkpoint
from services.planner.probes import Point, Probe, Search, key_maker
from services.planner.simulating import Conditions, run_probe

Found = TypeVar("Found")
Simulate = Callable[[Sequence[Probe]], Iterable[tuple[int, Point]]]
"""Points with their probes' numbers, in any order."""

_conditions: Conditions | None = None


def _start_worker(conditions: Conditions) -> None:
    """In a group of its own: who tells the whole plan to end tells this one's parent, and a worker that ends
    by itself while it holds the lock of their queue would stop everybody."""
    global _conditions
    os.setpgid(0, 0)
    _conditions = conditions


def _work(numbered: tuple[int, Probe]) -> tuple[int, Point]:
    number, probe = numbered
    if _conditions is None:
        raise RuntimeError("a worker was not started")
    return number, run_probe(probe, _conditions)


@contextmanager
def simulating(conditions: Conditions, processes: int) -> Iterator[Simulate]:
    """With one process it runs in this one."""
    if processes <= 1:
        yield lambda probes: ((number, run_probe(probe, conditions)) for number, probe in enumerate(probes))
        return
    context = multiprocessing.get_context("spawn")
    # Ctrl-C is this process's to answer: it keeps what is done and ends its workers, which inherit this.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        workers = context.Pool(processes, _start_worker, (conditions,))
    finally:
        signal.signal(signal.SIGINT, answer)
    with workers as pool:
        yield lambda probes: pool.imap_unordered(_work, enumerate(probes))


def drive(
    search: Search[Found],
    simulate: Simulate,
    checkpoint: Checkpoint,
    context: bytes,
    progress: Callable[[Probe], None] = lambda _: None,
) -> Found:
    """What the search found. ``progress`` is told of every probe that is simulated."""
    key_of = key_maker(context)
    points: Sequence[Point] | None = None
    while True:
        try:
            probes = next(search) if points is None else search.send(points)
        except StopIteration as end:
            found: Found = end.value
            return found
        keys = [key_of(probe) for probe in probes]
        missing = {
            key: probe for key, probe in zip(keys, probes, strict=True) if key not in checkpoint.points
        }
        # The longest first, so that no core waits for it at the end.
        order = sorted(missing, key=lambda key: -missing[key].requests)
        for number, point in simulate([missing[key] for key in order]):
            checkpoint.keep(order[number], point)
            progress(missing[order[number]])
        points = [checkpoint.points[key] for key in keys]
