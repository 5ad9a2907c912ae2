"""Aladdin's worker: how many devices should work as one (section 4.1, equations 5 and 6), and how many such
workers a rate takes (section 5.2, equation 7)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.planner.bounds import Speed
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.goodput import Served
from services.planner.probes import Probe, Search, Tally, Tell, ask, together, untold
from services.planner.workload import PlannedWorkload
from services.simulator.shape import PassShape

MOST_WORKERS = 1024
CLOSE = 32
"""Workers: one more or less is so small a part of them."""


@dataclass(frozen=True, slots=True)
class WorkerThroughput:
    """Decoded tokens a second and device, as equation 6 has it. ``batch``: that memory holds, or that keeps
    the time per token where this is ``is_slo_bound``."""

    kind: InstanceKind
    tokens_per_device_s: float
    batch: int
    step_s: float
    is_slo_bound: bool


@dataclass(frozen=True, slots=True)
class ComputeLaw:
    """Equation 5: a step takes ``k4_s`` / devices + ``c4_s``."""

    k4_s: float
    c4_s: float


@dataclass(frozen=True, slots=True)
class WorkerLaw:
    """Equation 7: ``k5_s`` · rate + ``c5`` workers, rounded up. ``seen``: (rate, workers that were
    enough)."""

    k5_s: float
    c5: float
    seen: tuple[tuple[float, int], ...]

    def workers(self, rate_per_s: float) -> int:
        return max(1, math.ceil(self.k5_s * rate_per_s + self.c5 - 1e-9))


def worker_throughput(
    kind: InstanceKind, speed: Speed, workload: PlannedWorkload, tpot_s: float
) -> WorkerThroughput | None:
    """None where not one sequence fits, or not even one keeps the time per token."""
    context = max(1.0, workload.context_tokens)
    full = int(speed.kv_tokens / context)

    def step_s(batch: int) -> float:
        return speed.performance.pass_s(PassShape((), batch, round(batch * context)))

    if full < 1 or step_s(1) > tpot_s:
        return None
    if step_s(full) <= tpot_s:
        seconds = step_s(full)
        return WorkerThroughput(kind, full / (kind.devices * seconds), full, seconds, False)
    low, high = 1, full
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= tpot_s else (low, middle)
    # Equation 6 counts the objective's time for a step here, not the step's own.
    return WorkerThroughput(kind, low / (kind.devices * tpot_s), low, step_s(low), True)


def best_workers(
    kinds: Sequence[InstanceKind],
    speeds: Mapping[InstanceKind, Speed],
    workload: PlannedWorkload,
    tpot_s: float,
) -> list[WorkerThroughput]:
    """Most per device first."""
    found = [worker_throughput(kind, speeds[kind], workload, tpot_s) for kind in kinds]
    return sorted(
        (each for each in found if each is not None), key=lambda each: (-each.tokens_per_device_s, each.kind)
    )


def compute_law(
    kinds: Sequence[InstanceKind], speeds: Mapping[InstanceKind, Speed], sequences: int, context_tokens: int
) -> ComputeLaw | None:
    """Of one kind of device: fitted over the numbers of them, to what a step of so many sequences takes. None
    of one number alone: any share of its step may be the constant."""
    if len({kind.devices for kind in kinds}) < 2:
        return None
    shares = np.array([[1 / kind.devices, 1.0] for kind in kinds])
    shape = PassShape((), sequences, context_tokens)
    seconds = np.array([speeds[kind].performance.pass_s(shape) for kind in kinds])
    (k4_s, c4_s), *_ = np.linalg.lstsq(shares, seconds, rcond=None)
    return ComputeLaw(float(k4_s), float(c4_s))


def fewest_workers(
    kind: InstanceKind, served: Served, rate_per_s: float, requests: int, least: int
) -> Search[int | None]:
    """That keep the objectives, whole instances that do both phases. Counted up from ``least``, the first
    that can be enough: where a few requests decide one more may do worse, and halving would take that for a
    need. Of more than ``CLOSE`` a part at a time is counted up, and then those in between."""

    def at(count: int) -> Probe:
        return Probe(pools=(PoolPlan(kind=kind, count=count),), rate_per_s=rate_per_s, requests=requests)

    low, high = max(1, least) - 1, max(1, least)
    while not served((yield from ask(at(high)))):
        low, high = high, high + max(1, high // CLOSE)
        if high > MOST_WORKERS:
            return None
    for count in range(low + 1, high):
        if served((yield from ask(at(count)))):
            return count
    return high


def worker_law(
    kind: InstanceKind,
    served: Served,
    rates: Sequence[float],
    requests: int,
    most_per_s: float,
    tell: Tell = untold,
) -> Search[WorkerLaw | None]:
    """A line through the fewest workers at several rates; None where a rate needs too many. ``most_per_s``:
    no worker serves more."""
    counts = yield from together(
        [fewest_workers(kind, served, rate, requests, math.ceil(rate / most_per_s)) for rate in rates],
        Tally(tell, "rates whose workers are counted", len(rates)),
    )
    seen = tuple((rate, count) for rate, count in zip(rates, counts, strict=True) if count is not None)
    return None if len(seen) < len(rates) else law_through(seen)


def law_through(seen: Sequence[tuple[float, int]]) -> WorkerLaw | None:
    """Least squares; None of fewer than two rates."""
    if len({rate for rate, _ in seen}) < 2:
        return None
    slope, constant = np.polyfit([rate for rate, _ in seen], [count for _, count in seen], 1)
    return WorkerLaw(float(slope), float(constant), tuple(seen))
