"""How much longer passes take while another process computes some on another core: cores have one memory
between them, and steps of few rows read weights as fast as it gives them.

Taken in turns with the same passes alone, as a shared machine is faster in some minutes than in others. A
process that only computed, in its registers, made no pass longer. One that computed passes made each of the
others longer by milliseconds in proportion to how many a second, as each reads the weights, a step of one
sequence in 13 ms, a chunk of 256 tokens in 200; and by a share of its time that hangs on the minutes alone
(1 to 5 %). A step of one sequence took 9 to 23 % longer beside steps of one to four and 3 beside that chunk,
the chunk itself 4 to 6 and 1 % (measured on a Zen 5). It is processor time: who keeps whom from a core is
another thing, and beside two busy cores whatever else a machine does keeps somebody from one.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import nnls

from common.config import Config
from common.errors import LamellaError, ServiceError
from common.profile import Contention
from services.hosts.engines import load_engine
from services.profiling.pass_watch import PassWatch
from services.profiling.passes import Case, Shared, as_chunk, as_step

CASES = (
    *map(as_chunk, ((0, 16), (0, 64), (0, 128), (0, 256), (256, 256))),
    *map(as_step, ((1, 128), (4, 128), (8, 256), (16, 256), (32, 256), (64, 128))),
    (((0, 64),), 4, 128),
)
"""That are made longer, where there is room for them."""
NEIGHBOURS: Mapping[bytes, tuple[Shared, ...]] = {
    b"quick": tuple(map(as_step, ((1, 128), (4, 128)))),
    b"slow": (as_chunk((0, 64)), *map(as_step, ((16, 256), (32, 256)))),
}
"""What the other process computes, again and again: those for which there is room. Of ``CASES`` all, as what
they take alone says how many a second it would compute."""
REST, END = b"rest", b"end"
DONE, NO_ROOM, FAILED = b"done", b"no room", b"failed"
"""Its answers; the last is followed by why."""
READY_S, JOIN_S = 300.0, 10.0


class BesideOthers(msgspec.Struct, frozen=True, array_like=True):
    """What a pass took beside a process that alone would compute so many a second."""

    passes_per_s: float
    seconds: float


class ContendedPass(msgspec.Struct, frozen=True, array_like=True):
    """What one took alone, and once beside each kind of ``NEIGHBOURS``."""

    chunks: tuple[Case, ...]
    batch: int
    context: int
    alone_s: float
    beside: tuple[BesideOthers, ...]


class NeighbourLost(ServiceError):
    """The process that was to compute beside this one has failed, ended, or says nothing."""


class Neighbour:
    """Another process with an engine of its own, that computes what it is told to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, what: bytes) -> bool:
        """Returns once it does; False where it has room for none of that, and rests. Raises NeighbourLost."""
        try:
            self._connection.send_bytes(what)
            if not self._connection.poll(READY_S):
                raise NeighbourLost(f"a process that computes beside this one said nothing for {READY_S:g} s")
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as exc:
            raise NeighbourLost("a process that computes beside this one ended") from exc
        if answer.startswith(FAILED):
            reason = answer.removeprefix(FAILED).decode()
            raise NeighbourLost(f"a process that computes beside this one failed: {reason}")
        return answer == DONE


class ContentionWatch:
    """Times passes of an engine alone and beside ``neighbour``'s."""

    def __init__(self, watch: PassWatch, neighbour: Neighbour) -> None:
        self._watch = watch
        self._neighbour = neighbour
        self._cases: list[Shared] = []

    async def warm_up(self) -> bool:
        """First passes touch memory. Whether both have room for any, and the other process is at rest. Raises
        NeighbourLost."""
        has_room = [await asyncio.to_thread(self._neighbour.tell, what) for what in (*NEIGHBOURS, REST)]
        self._cases = [case for case in CASES if await self._watch.first(case) is not None]
        return all(has_room) and bool(self._cases)

    async def take(self) -> list[ContendedPass]:
        """Each once alone and once beside either. Raises NeighbourLost."""
        alone_s = await self._times(REST)
        beside = {what: await self._times(what) for what in NEIGHBOURS}
        await asyncio.to_thread(self._neighbour.tell, REST)
        rates = {
            what: _passes_per_s([alone_s[case] for case in NEIGHBOURS[what] if case in alone_s])
            for what in NEIGHBOURS
        }
        return [
            ContendedPass(
                *case, taken_s, tuple(BesideOthers(rates[what], beside[what][case]) for what in NEIGHBOURS)
            )
            for case, taken_s in alone_s.items()
        ]

    async def _times(self, what: bytes) -> dict[Shared, float]:
        await asyncio.to_thread(self._neighbour.tell, what)
        # One finds a core that slept.
        await self._watch.time(self._cases[0])
        return {case: await self._watch.time(case) for case in self._cases}


def _passes_per_s(alone_s: Sequence[float]) -> float:
    """Of who computes them in turn."""
    return len(alone_s) / sum(alone_s)


def has_neighbours(config: Config) -> bool:
    """Whether instances with these settings compute beside one another here, each on cores of its own: those
    that are not given theirs share all of them, and accelerators have memory of their own."""
    threads = config.model.threads
    is_here = config.instance.engine == "model" and config.model.device == "cpu"
    return is_here and threads is not None and 2 * threads <= len(os.sched_getaffinity(0))


async def measure_contention(
    watch: PassWatch, config: Config, directory: Path, rounds: int, progress: Callable[[int], None]
) -> Contention | None:
    """``watch``: by processor time. None where there is no room for any of the passes. ``progress``: of
    rounds that are done. Raises NeighbourLost."""
    taken: list[ContendedPass] = []
    with neighbour_of(config, directory) as neighbour:
        contention = ContentionWatch(watch, neighbour)
        if not await contention.warm_up():
            return None
        for done in range(rounds):
            taken += await contention.take()
            progress(done + 1)
    return fit_contention(taken)


def fit_contention(taken: Sequence[ContendedPass]) -> Contention:
    """Least squares of how many times as long passes took as alone, with nothing under 0: of each beside each
    kind of neighbour once, by the medians over its minutes."""
    seen: dict[tuple[Shared, int], list[tuple[float, float, float]]] = defaultdict(list)
    for each in taken:
        case = each.chunks, each.batch, each.context
        for kind, (passes_per_s, seconds) in enumerate(map(msgspec.structs.astuple, each.beside)):
            seen[case, kind].append((each.alone_s, passes_per_s, seconds / each.alone_s - 1.0))
    medians = np.array([[*map(statistics.median, zip(*each, strict=True))] for each in seen.values()])
    alone_s, passes_per_s, more = medians.T
    (s_per_rate, share), _ = nnls(np.column_stack((passes_per_s / alone_s, np.ones_like(alone_s))), more)
    return Contention(float(s_per_rate), float(share))


@contextmanager
def neighbour_of(config: Config, directory: Path) -> Iterator[Neighbour]:
    """It has ended when this does."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=compute_beside, args=(config, directory, there), daemon=True)
    process.start()
    there.close()
    try:
        yield Neighbour(here)
    finally:
        with suppress(OSError):
            here.send_bytes(END)
        here.close()
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
            process.join()


def compute_beside(config: Config, directory: Path, connection: Connection) -> None:
    """Runs until it is told to end, or nobody is there who could tell it."""
    with suppress(EOFError, OSError, KeyboardInterrupt):
        try:
            asyncio.run(_compute(config, directory, connection))
        except (LamellaError, MemoryError) as exc:
            connection.send_bytes(FAILED + (str(exc) or "out of memory").encode())


async def _compute(config: Config, directory: Path, connection: Connection) -> None:
    engine = await load_engine(config, directory)
    watch = PassWatch(engine, time.perf_counter)
    try:
        while (what := connection.recv_bytes()) != END:
            # First passes touch memory.
            cases = [case for case in NEIGHBOURS.get(what, ()) if await watch.first(case) is not None]
            connection.send_bytes(DONE if cases or what == REST else NO_ROOM)
            while cases and not connection.poll():
                for case in cases:
                    await watch.time(case)
    finally:
        engine.thread.close()
