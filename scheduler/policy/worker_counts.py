"""How many workers a workload needs, by what instances have learned of their own speed and what is promised.

A first estimate, by queueing: it needs no history. Prefill is a queue (DistServe 3.1's M/D/1, here of several
servers and any variation, by Erlang's C with Allen and Cunneen's correction) whose wait and work together
keep the TTFT for the goal's share of requests. Decode has no queue but a batch: by Little's law it is as
large as what arrives stays long, with room for its usual spread (the normal law of a Poisson count), and its
steps keep the TPOT and its KV the memory. All are monotone in the rate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.latency import ATTAINMENT_GOAL
from common.laws import PAIRS, TOKENS
from common.performance import FittedTime
from scheduler.policy.workload import SPREAD, Workload

MOST_WORKERS = 1024
GATEWAY_TOKENS_PER_S = 40_000.0
"""One carried 59,500 on a core, within 2 ms of delay up to this (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class Need:
    """``why``: half a sentence."""

    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is promised, and how far a worker may be loaded. ``utilisation``: of its time, batch and KV.
    ``capacity_tokens``: KV of one decode instance."""

    ttft_s: float
    tpot_s: float
    utilisation: float
    chunk_tokens: float
    max_decode_batch: int
    capacity_tokens: float


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of a mean prompt: seconds of prefill. ``variation``: squared, of that time."""

    seconds: float
    variation: float


@dataclass(frozen=True, slots=True)
class Steps:
    """A decode step takes ``base_s`` and ``per_sequence_s`` for each, with ``context_tokens`` of KV."""

    base_s: float
    per_sequence_s: float
    context_tokens: float

    def seconds(self, batch: float) -> float:
        return self.base_s + self.per_sequence_s * batch

    def most(self, bounds: Bounds) -> float:
        """Sequences that keep the TPOT, the batch's bound and the KV; at least 1: fewer cannot be."""
        kept = min(float(bounds.max_decode_batch), bounds.capacity_tokens / max(1.0, self.context_tokens))
        left_s = bounds.tpot_s - self.base_s
        if left_s > 0 and self.per_sequence_s > 0:
            kept = min(kept, left_s / self.per_sequence_s)
        return max(1.0, kept)


def mean_fit(fits: Sequence[FittedTime]) -> FittedTime | None:
    """What instances have learned of one law, each by its samples' number; None where none has."""
    samples = sum(each.samples for each in fits)
    if not samples:
        return None
    columns = zip(*(each.coefficients for each in fits), strict=True)
    weights = [each.samples / samples for each in fits]
    return FittedTime(
        tuple(sum(map(float.__mul__, weights, column)) for column in columns),
        sum(weight * each.relative_error for weight, each in zip(weights, fits, strict=True)),
        samples,
    )


def chunks_of(workload: Workload, chunk_time: FittedTime, chunk_tokens: float) -> Chunks:
    """Over the workload's prompts: attention's pairs grow by their squares."""
    prompts = workload.prompts
    pairs = (prompts.variance + prompts.mean**2 - prompts.mean) / 2
    chunks = max(1.0, prompts.mean / chunk_tokens)
    seconds = chunk_time.seconds((prompts.mean / TOKENS, pairs / PAIRS, chunks))
    return Chunks(seconds, prompts.squared_variation)


def steps_of(workload: Workload, step_time: FittedTime) -> Steps:
    """With the context that a sequence has on average over the steps of its life. A law of few batches may
    give the whole step to one term, so that neither is under nothing."""
    outputs = workload.outputs
    drawn = (outputs.variance + outputs.mean**2) / (2 * outputs.mean) if outputs.mean else 0.0
    context = workload.prompts.mean + drawn
    per_token, per_sequence, base = step_time.coefficients
    return Steps(max(0.0, base), max(0.0, per_token * context / TOKENS + per_sequence), context)


def prefill_need(workload: Workload, chunks: Chunks, bounds: Bounds) -> Need:
    offered = workload.rate_per_s * chunks.seconds

    def keeps(workers: int) -> bool:
        return _is_served_in_time(workload, chunks, bounds, workers)

    why = (
        f"prompts of {workload.prompts.mean:.0f} tokens take {chunks.seconds:.3g} s each,"
        f" {offered:.2g} instances' time; first tokens within {bounds.ttft_s:g} s"
    )
    return Need(_least(keeps), why)


def decode_need(workload: Workload, steps: Steps, bounds: Bounds) -> Need:
    most = steps.most(bounds)
    drawn_per_s = workload.rate_per_s * workload.outputs.mean

    def keeps(workers: int) -> bool:
        batch = _batch(drawn_per_s / workers, steps)
        return _largest(batch, workload, bounds) <= most

    why = (
        f"{drawn_per_s:.3g} tokens/s; an instance keeps {most:.0f} sequences of"
        f" {steps.context_tokens:.0f} tokens in steps of {steps.seconds(most):.3g} s,"
        f" at most {bounds.tpot_s:g} s"
    )
    return Need(_least(keeps), why)


def mixed_need(workload: Workload, chunks: Chunks, steps: Steps, bounds: Bounds) -> Need:
    """Of instances that do both. What these have learned of chunks and steps has in it how long one waits for
    the other: as many as either half needs will do."""
    halves = prefill_need(workload, chunks, bounds), decode_need(workload, steps, bounds)
    return max(halves, key=lambda need: need.workers)


def attention_need(
    workload: Workload, steps: Steps, bounds: Bounds, decode_instances: int, tokens_per_worker: float
) -> Need:
    """Of workers that hold whole sequences: their memory. ``tokens_per_worker``: of KV, for all decode
    instances together; ``bounds.capacity_tokens`` says nothing here."""
    drawn_per_s = workload.rate_per_s * workload.outputs.mean
    batch = _batch(drawn_per_s / decode_instances, steps)
    sequences = min(float(bounds.max_decode_batch), _largest(batch, workload, bounds))
    tokens = decode_instances * sequences * steps.context_tokens
    workers = min(MOST_WORKERS, max(1, math.ceil(tokens / max(1.0, tokens_per_worker))))
    return Need(workers, f"{tokens:.0f} tokens of KV at {tokens_per_worker:.0f} a worker")


def gateway_need(workload: Workload, open_requests: int, bounds: Bounds, max_open_requests: int) -> Need:
    """By tokens carried, and by streams that are open."""
    drawn_per_s = workload.rate_per_s * workload.outputs.mean
    by_tokens = drawn_per_s / GATEWAY_TOKENS_PER_S
    by_streams = open_requests / max_open_requests
    workers = max(1, math.ceil(max(by_tokens, by_streams) / bounds.utilisation))
    return Need(min(MOST_WORKERS, workers), f"{drawn_per_s:.3g} tokens/s in {open_requests} streams")


def _least(keeps: Callable[[int], bool]) -> int:
    """The fewest workers that do; each test gets easier with more."""
    low, high = 0, 1
    while high < MOST_WORKERS and not keeps(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def _is_served_in_time(workload: Workload, chunks: Chunks, bounds: Bounds, workers: int) -> bool:
    """Whether the goal's share of prompts waits no longer than their own time leaves of the TTFT. Where it
    leaves nothing, no number of workers helps, and utilisation alone decides."""
    offered = workload.rate_per_s * chunks.seconds
    if offered > workers * bounds.utilisation:
        return False
    left_s = bounds.ttft_s - chunks.seconds
    if offered == 0 or left_s <= 0:
        return True
    variation = max(0.1, workload.arrival_variation + chunks.variation)
    drained = (workers - offered) / chunks.seconds * left_s * 2 / variation
    return waiting_share(workers, offered) * math.exp(-drained) <= 1 - ATTAINMENT_GOAL


def waiting_share(servers: int, offered: float) -> float:
    """Erlang's C: who has to wait at all, of ``offered`` servers' work; under ``servers``."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return servers * blocked / (servers - offered * (1 - blocked))


def _batch(drawn_per_s: float, steps: Steps) -> float:
    """Where as much is drawn as is asked for; infinite where that is never so."""
    left = 1 - drawn_per_s * steps.per_sequence_s
    return drawn_per_s * steps.base_s / left if left > 0 else math.inf


def _largest(batch: float, workload: Workload, bounds: Bounds) -> float:
    """What a batch of that mean usually stays under, and what utilisation allows for."""
    spread = SPREAD * math.sqrt(batch * max(1.0, workload.arrival_variation))
    return max(batch + spread, batch / bounds.utilisation)
