"""What instances did: each of them over all its lives, and together those of a pool."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from common.ids import InstanceId
from services.simulator.cluster import Cluster
from services.simulator.instance import SimulatedInstance


class LivesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """By some lives. Shares are of the time that they were there. ``batch``: sequences of a decode step, on
    average; ``kv_peak``: the most blocks that one of them used, as a share of its own."""

    busy: float
    prefill_busy: float
    chunk_tokens: int
    decode_steps: int
    batch: float
    kv_peak: float
    preempted: int


class InstanceSummary(LivesSummary, frozen=True, kw_only=True):
    """Of one instance. ``pool``: that it was started for; ``lives``: one, and one more for each time that it
    came back after a death."""

    name: str
    pool: str
    lives: int


def use_of(lives: Sequence[SimulatedInstance], first_s: float, last_s: float) -> LivesSummary:
    """In a run of which that was the first moment and that the last."""
    there_s = math.fsum(within_s(each.began_s, each.ended_s, first_s, last_s) for each in lives)
    busy = [each.engine.busy for each in lives]
    prefill_s = math.fsum(each.prefill_s + each.both_s for each in busy)
    busy_s = prefill_s + math.fsum(each.decode_s for each in busy)
    steps = sum(each.decode.drawing.steps for each in lives)
    rows = sum(each.decode.drawing.rows for each in lives)
    return LivesSummary(
        busy=busy_s / there_s if there_s > 0 else 0.0,
        prefill_busy=prefill_s / there_s if there_s > 0 else 0.0,
        chunk_tokens=sum(each.prefill.chunk_tokens for each in lives),
        decode_steps=steps,
        batch=mean(rows, steps),
        kv_peak=max((each.most_used_blocks / each.record.total_blocks for each in lives), default=0.0),
        preempted=sum(each.decode_state.preempted for each in lives),
    )


def instance_uses(cluster: Cluster, first_s: float, last_s: float) -> Iterator[InstanceSummary]:
    """In the order in which they were asked for; those that never were ready are left out."""
    lives: dict[InstanceId, list[SimulatedInstance]] = {}
    for each in cluster.lives:
        lives.setdefault(each.instance_id, []).append(each)
    for name in cluster.staff.terms:
        if name in lives:
            use = use_of(lives[name], first_s, last_s)
            yield InstanceSummary(
                name=name, pool=cluster.pool_of[name], lives=len(lives[name]), **msgspec.structs.asdict(use)
            )


def within_s(began_s: float, ended_s: float | None, first_s: float, last_s: float) -> float:
    """Of the run's time. ``ended_s`` None: not yet."""
    return max(0.0, (last_s if ended_s is None else min(last_s, ended_s)) - max(first_s, began_s))


def mean(total: float, count: int) -> float:
    return total / count if count else 0.0
