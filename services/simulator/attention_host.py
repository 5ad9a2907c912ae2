"""What steps over attention workers take of the cores of a machine that all share, and how they get on there.

A model replica's thread that waits for attention looks out for it before it sleeps: it counts as one that
computes all the time. A worker's takes what its attention takes, and is woken for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.simulator.attention_cost import LayerCost
from services.simulator.attention_course import Course
from services.simulator.host import NO_LONGER, Host, Paced, Wanted


@dataclass(slots=True)
class HostShare:
    """Of those who use the same workers. ``busiest``: of a core, that the one takes who takes most."""

    host: Host
    busiest: float = 0.0

    def wanted(self, courses: Sequence[Course], rates: Sequence[float]) -> list[Wanted]:
        """At so many layers a second of each."""
        replicas = 0.0
        workers: dict[str, float] = {}
        for course, rate in zip(courses, rates, strict=True):
            layer = course.layer_cost(0)
            sequences = sum(each.sequences for each in course.rows)
            beside_s = self.host.beside_s(sequences, 0, 0) / course.engine.cost.layers
            replicas += rate * (layer.slice_s + beside_s)
            for share in layer.shares:
                for worker in share.workers:
                    workers[worker] = workers.get(worker, 0.0) + rate * share.attention_s
        self.busiest = max(workers.values(), default=0.0)
        wanted = [Wanted(replicas), Wanted(sum(workers.values()), self.busiest)]
        return [each for each in wanted if each.cores > 0]

    def slowed(self, cost: LayerCost, layers: int, who: Paced) -> LayerCost:
        """As it comes out beside the others, of a step of so many layers by ``who``: passes of others make
        its slices longer, and attention, which reads memory as they do, by their share."""
        host, longer = self.host, self.host.longer_for(who)
        if not host.is_short and longer == NO_LONGER:
            return cost
        slice_s = (1 + longer.share) * cost.slice_s + longer.more_s / layers
        slice_s /= host.pace()
        attention_times = (1 + longer.share) / host.pace(self.busiest)
        attention_s = max((each.attention_s for each in cost.shares), default=0.0)
        more_s = slice_s - cost.slice_s + (attention_times - 1) * attention_s
        more_s += host.config.exchange_s if host.is_short else 0.0
        return cost._replace(
            slice_s=slice_s,
            alone_s=cost.alone_s + more_s,
            offline_s=cost.offline_s + more_s,
            shares=tuple(
                each._replace(attention_s=attention_times * each.attention_s) for each in cost.shares
            ),
        )
