"""At what pace the machine was in each run of a configuration: by what passes took near it, and by what a
fixed piece of work took in it.

Passes are taken before and after a run, looks (``services.profiling.probe``) all through it. But looks feel
what a mesh's engines take of the memory and the caches, too, and the more so the more cores these keep
busy: 5 to 10 % (measured on a Zen 5). So a run's looks are held to a line through those of all
the configuration's runs, over the cores that instances kept busy.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from services.compare.records import RunKey, RunRecord

LEAST_LOOKS, LEAST_RUNS = 10, 5
"""A look is off by some 7 %, and who draws a line has to have runs beside it."""
OF_LOOKS = 1 / 3
"""How much of that counts: looks are off by twice as much as passes near a run. Of 18 runs' steps, which were
off by -2 to +9 % beside simulated ones, looks' and passes' deviations went with 0.7 and 0.6 (correlation)."""


def with_looks(near: Mapping[RunKey, float], records: Sequence[RunRecord]) -> dict[RunKey, float]:
    """Of each run as ``near`` has it, and as its looks have it where enough runs have enough of them.
    ``records``: of one configuration."""
    looked = [each for each in records if each.key in near and len(each.looks_s) >= LEAST_LOOKS]
    if len(looked) < LEAST_RUNS:
        return dict(near)
    off = [math.log(statistics.fmean(each.looks_s) / near[each.key]) for each in looked]
    busy_cores = [each.instances_cpu_s / each.duration_s for each in looked]
    weights = np.sqrt([len(each.looks_s) for each in looked])
    line = np.polynomial.Polynomial.fit(busy_cores, off, 1, w=weights)
    return dict(near) | {
        each.key: near[each.key] * math.exp(OF_LOOKS * (found - float(line(busy))))
        for each, found, busy in zip(looked, off, busy_cores, strict=True)
    }
