"""Two processes that compute in turns, a layer each, beside others that compute in bursts: by how they wait.

    python bench/waiting.py [--rounds 2]

``yield``: offers its core at every look, then sleeps for longer and longer; ``asleep``: on a bell, at once;
``adaptive``: as ``common.model.waiting`` does.
"""

import argparse
import math
import mmap
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from common.bell import Bell, Bells, bells_of
from common.model import waiting as module
from common.model.waiting import Waiting

LAYERS, STEPS, FIRST_STEPS = 30, 60, 10
SLICE_S, ATTENTION_S = 0.0014, 0.0007
WAYS = ("yield", "asleep", "adaptive")
BESIDE = (
    ("nobody", ()),
    ("bursts of 25 ms with 6 between, three small loops", ((0.025, 0.006), *[(0.001, 0.009)] * 3)),
    ("bursts of 180 ms with 20 between, a small loop", ((0.18, 0.02), (0.001, 0.009))),
)
BELL_BYTES = 64
FORK = multiprocessing.get_context("fork")
"""Its children have what was mapped before."""


def compute(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def compute_in_bursts(burst_s: float, between_s: float) -> None:
    while True:
        compute(burst_s)
        time.sleep(between_s)


def waiting_of(way: str) -> Waiting:
    if way == "yield":
        module.LATE_S = math.inf
    if way == "asleep":
        module.SPINS, module.YIELD_S, module.LATE_S = 1, 0.0, 0.0
    return Waiting()


def take_turns(way: str, shared: mmap.mmap, is_first: bool, told: Connection) -> None:
    """Each side's bell counts the layers that it has done."""
    own, peer = (Bell(memoryview(shared), BELL_BYTES * (number == is_first)) for number in (0, 1))
    waiting = waiting_of(way)
    bells = None if way == "yield" else bells_of([peer])
    taken_s = []
    for _ in range(STEPS):
        began_s = time.monotonic()
        for _ in range(LAYERS):
            if is_first:
                compute(SLICE_S)
                own.ring()
                wait(peer, own.rings, waiting, bells)
            else:
                wait(peer, own.rings + 1, waiting, bells)
                compute(ATTENTION_S)
                own.ring()
        taken_s.append(time.monotonic() - began_s)
    told.send(taken_s[FIRST_STEPS:])


def wait(peer: Bell, rings: int, waiting: Waiting, bells: Bells | None) -> None:
    while peer.rings != rings:
        waiting.pause(bells)
    waiting.restart()


@contextmanager
def others(bursts: tuple[tuple[float, float], ...]) -> Iterator[None]:
    processes = [FORK.Process(target=compute_in_bursts, args=each, daemon=True) for each in bursts]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


def steps_s(way: str) -> list[float]:
    shared = mmap.mmap(-1, 2 * BELL_BYTES)
    mine, theirs = FORK.Pipe()
    sides = [
        FORK.Process(target=take_turns, args=(way, shared, is_first, theirs)) for is_first in (True, False)
    ]
    for side in sides:
        side.start()
    taken_s: list[float] = max(mine.recv(), mine.recv(), key=statistics.median)
    for side in sides:
        side.join()
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    print(f"a step computes for {1e3 * LAYERS * (SLICE_S + ATTENTION_S):.0f} ms")
    for what, bursts in BESIDE:
        taken_s: dict[str, list[float]] = {way: [] for way in WAYS}
        with others(bursts):
            for _ in range(rounds):
                for way in WAYS:
                    taken_s[way] += steps_s(way)
        medians = (f"{way} {1e3 * statistics.median(each):.1f} ms" for way, each in taken_s.items())
        print(f"beside {what}: {', '.join(medians)}", flush=True)


if __name__ == "__main__":
    main()
