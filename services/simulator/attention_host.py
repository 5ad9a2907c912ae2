"""What steps over attention workers take of the cores of a machine that all share."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.simulator.host import Host, Wanted

if TYPE_CHECKING:
    from services.simulator.attention_course import Course


def wanted_of(host: Host, courses: "Sequence[Course]") -> Wanted:
    """A replica of each engine's for every lane that is in a step, the workers, and what steps bring about
    beside."""
    lanes = Counter(course.engine for course in courses)
    cores = float(sum(min(count, engine.turns.replicas) for engine, count in lanes.items()))
    workers: set[str] = set()
    for course in courses:
        for each in course.rows:
            workers.update(course.engine.pools.workers[each.pool])
        sequences = sum(each.sequences for each in course.rows)
        step_s = course.engine.cost.layers * course.layer_cost(0).alone_s
        cores += host.cores_for(step_s, sequences, 0, 0) - 1.0
    spinning = len(workers) * host.config.worker_cores
    return Wanted(cores + spinning, (1.0 - host.config.held_share) * spinning)
