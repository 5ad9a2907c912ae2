"""The most requests a second that one instance can serve, in closed form: what prunes before anything is run.

All passes are as full as they may be, nobody ever waits, and KV has no blocks: queues, bursts and lengths
that differ only take from that. Passes hold what requests bring of prompts and decodes on average, which a
mix of unlike ones may better where costs have kinks: ``SLACK`` is for it, and for the share of requests that
may miss their objectives.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.latency import ServiceObjectives
from services.planner.candidates import InstanceKind
from services.planner.workload import PlannedWorkload
from services.simulator.performance.interface import PerformanceModel
from services.simulator.shape import PassShape
from services.simulator.slowdowns import prompt_alone_s

SLACK = 1.15
BATCH_STEPS = 24
"""Batches that are looked at, each a little larger than the one before."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of an instance: how long its passes take, and how much KV it holds."""

    performance: PerformanceModel
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Bound:
    """``rate_per_s``: never more. ``sojourn_s``: about how long a request stays at it, queues left out."""

    rate_per_s: float
    sojourn_s: float


NONE = Bound(0.0, 0.0)


def capacity_bound(
    kind: InstanceKind, speed: Speed, workload: PlannedWorkload, objectives: ServiceObjectives, goal: float
) -> Bound:
    """NONE where the objectives cannot be kept even by requests that come alone."""
    prompt = 0.0
    if kind.role != "decode":
        # Orca computes a prompt in one pass, be it longer.
        pass_tokens = max(kind.chunk_tokens, *(workload.prompts if kind.mixed_policy == "orca" else ()), 1)
        if _is_too_slow_alone(speed, workload, objectives, goal, pass_tokens):
            return NONE
        prompt = prompt_s(speed.performance, workload, pass_tokens)
    if kind.role == "prefill" or not workload.decoded:
        return Bound(SLACK * kind.pipeline / prompt if prompt else math.inf, prompt)
    best = NONE
    for batch in _batches(kind, speed, workload):
        rate = _served(kind, speed, workload, batch, prompt)
        # Little's law: so many stay so long.
        sojourn_s = batch * kind.turns / rate
        if objectives.tpot_s is not None and sojourn_s > workload.decoded * objectives.tpot_s * SLACK:
            continue
        if rate * SLACK > best.rate_per_s:
            best = Bound(rate * SLACK, prompt + sojourn_s)
    return best


def prompt_s(performance: PerformanceModel, workload: PlannedWorkload, chunk_tokens: int) -> float:
    """Of a mean prompt, where one follows on another and every pass is full."""
    seconds, chunks, room = 0.0, [], chunk_tokens
    for tokens in workload.prompts:
        before = 0
        while before < tokens:
            taken = min(room, tokens - before)
            chunks.append((before, taken))
            before, room = before + taken, room - taken
            if not room:
                seconds += performance.pass_s(PassShape(tuple(chunks)))
                chunks, room = [], chunk_tokens
    if chunks:
        seconds += performance.pass_s(PassShape(tuple(chunks))) * (1 - room / chunk_tokens)
    return seconds / len(workload.prompts)


def _is_too_slow_alone(
    speed: Speed, workload: PlannedWorkload, objectives: ServiceObjectives, goal: float, chunk_tokens: int
) -> bool:
    if objectives.ttft_s is None:
        return False
    bound_s = objectives.ttft_s
    late = sum(prompt_alone_s(speed.performance, each, chunk_tokens) > bound_s for each in workload.prompts)
    return late > (1 - goal) * len(workload.prompts)


def _batches(kind: InstanceKind, speed: Speed, workload: PlannedWorkload) -> Iterator[int]:
    """That are on their way at once, each up to what the settings and the memory allow all of them."""
    held = speed.kv_tokens / max(1.0, workload.context_tokens)
    most = max(1, min(kind.max_decode_batch, math.floor(held)) // kind.turns)
    yield from sorted({max(1, round(most ** (step / BATCH_STEPS))) for step in range(BATCH_STEPS + 1)})


def _served(kind: InstanceKind, speed: Speed, workload: PlannedWorkload, batch: int, prompt: float) -> float:
    """Requests a second with so many sequences in every step, and a pass in every turn."""
    context = round(batch * workload.context_tokens)
    performance = speed.performance
    drawn = batch / workload.decoded
    apart = kind.turns / (prompt + performance.pass_s(PassShape((), batch, context)) / drawn)
    if kind.role == "mixed" and kind.mixed_policy in ("chunked", "splitwise", "orca"):
        # Whole, a prompt may be longer than what decodes leave of a pass.
        least = workload.prompt_tokens if kind.mixed_policy == "orca" else 1
        beside = min(drawn * workload.prompt_tokens, max(least, kind.chunk_tokens - batch))
        chunk = ((round(workload.prompt_tokens / 2), max(1, round(beside))),)
        pass_s = performance.pass_s(PassShape(chunk, batch, context))
        together = kind.turns * beside / workload.prompt_tokens / pass_s
        # Decodes that do not fit beside prompts are computed without.
        return max(together, apart) if kind.mixed_policy == "splitwise" else together
    return apart
