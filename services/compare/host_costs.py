"""What a mesh takes of its machine's cores beside the passes of its model, from the processor time of its
calibrating runs, and of other meshes': so much for each pass, each token and each prompt, and more for one
that is handed over, and for each of its tokens.

By its own five runs alone a prompt cost a mesh 2.1 ms, another 10.8; by all of their runs 4.8 and 4.6
(measured on a Zen 5). What is not handed over costs less.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np

from services.compare.records import RunRecord
from services.simulator.host_config import HostConfig


class Counted(NamedTuple):
    """What a run computed. ``is_handed_over``: prompts are decoded by others than compute them."""

    passes: int
    tokens: int
    prompts: int
    prompt_tokens: int
    is_handed_over: bool = False

    @property
    def kinds(self) -> tuple[int, ...]:
        """That cost something each."""
        handed = self.is_handed_over
        return self.passes, self.tokens, self.prompts, handed * self.prompts, handed * self.prompt_tokens


def host_of(runs: Sequence[tuple[RunRecord, Counted]], configuration: str) -> HostConfig | None:
    """Of one of the configurations whose runs these are, by least squares over all, with no cost under 0.
    None where processor time was not looked at."""
    seen = [(record, counted) for record, counted in runs if record.idle_cores is not None and record.cores]
    idle: dict[str, list[float]] = defaultdict(list)
    for record, _ in seen:
        idle[record.configuration].append(record.idle_cores or 0.0)
    own = [(record, counted) for record, counted in seen if record.configuration == configuration]
    if not own:
        return None
    taken_s = [
        max(0.0, record.beside_cpu_s - fmean(idle[record.configuration]) * record.duration_s)
        for record, _ in seen
    ]
    pass_s, token_s, prompt_s, handed_s, handed_token_s = costs_of(
        [counted.kinds for _, counted in seen], taken_s
    )
    is_handed_over = own[0][1].is_handed_over
    return HostConfig(
        cores=own[0][0].cores,
        idle_cores=fmean(idle[configuration]),
        pass_s=pass_s,
        token_s=token_s,
        prompt_s=prompt_s + is_handed_over * handed_s,
        prompt_token_s=is_handed_over * handed_token_s,
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
