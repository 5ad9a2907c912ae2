"""What a mesh takes of its machine's cores beside the passes of its model, from the processor time of its
calibrating runs: so much for each pass, each token, each prompt and each of its tokens."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from services.compare.records import RunRecord
from services.simulator.host_config import HostConfig


class Counted(NamedTuple):
    """What a run computed."""

    passes: int
    tokens: int
    prompts: int
    prompt_tokens: int


class Gaps(NamedTuple):
    """How long a model rests before a pass, and more for each token that the one before drew, seconds."""

    pass_s: float
    token_s: float


def gaps_of_runs(runs: Sequence[RunRecord]) -> Gaps:
    """By least squares over these runs: an event loop takes each token to who asked for it."""
    counts = [[run.gaps, sum(each.output_tokens - 1 for each in run.served)] for run in runs]
    return Gaps(*costs_of(counts, [run.gap_s for run in runs]))


def host_of(runs: Sequence[tuple[RunRecord, Counted]]) -> HostConfig | None:
    """By least squares over these runs, with no cost under 0. None where processor time was not looked at."""
    seen = [(record, counted) for record, counted in runs if record.idle_cores is not None and record.cores]
    if not seen:
        return None
    idle_cores = float(np.mean([record.idle_cores for record, _ in seen]))
    taken_s = [max(0.0, record.beside_cpu_s - idle_cores * record.duration_s) for record, _ in seen]
    counts = [list(each) for _, each in seen]
    pass_s, token_s, prompt_s, prompt_token_s = costs_of(counts, taken_s)
    return HostConfig(
        cores=seen[0][0].cores,
        idle_cores=idle_cores,
        pass_s=pass_s,
        token_s=token_s,
        prompt_s=prompt_s,
        prompt_token_s=prompt_token_s,
    )


def costs_of(counts: Sequence[Sequence[float]], taken: Sequence[float]) -> list[float]:
    """What each of the counted costs, at least 0, so that all together are nearest to what was taken. What is
    taken by many small pieces of work spreads by the square root of what they take: a run of seconds says
    more than one of tenths, though not as many times more. Of several answers the one that names fewest
    costs."""
    wanted = np.sqrt(np.maximum(1e-9, np.array(taken)))
    rows = np.array(counts, dtype=float) / wanted[:, None]
    kinds = rows.shape[1]
    best, least = np.zeros(kinds), float(wanted @ wanted)
    for size in range(1, min(kinds, len(rows)) + 1):
        for some in combinations(range(kinds), size):
            found, *_ = np.linalg.lstsq(rows[:, some], wanted, rcond=None)
            off = float(np.sum((rows[:, some] @ found - wanted) ** 2))
            if (found >= 0).all() and off < least - 1e-9:
                best, least = np.zeros(kinds), off
                best[list(some)] = found
    return [float(each) for each in best]
