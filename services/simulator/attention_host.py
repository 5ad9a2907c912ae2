"""What steps over attention workers take of the cores of a machine that all share, and how they get on there.

A model replica's thread that waits for attention looks out for it before it sleeps: it counts as one that
computes all the time. A worker's takes what its attention takes, and is woken for each layer. While more
is wanted than there is, the two of them share a core and take turns on it: attention goes on after a slice,
not beside the part of it in which K and V are computed, and each finds its caches used by the other. Both
together get what one thread does then, with all that steps bring about beside; others get on as beside two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.simulator.attention_cost import LayerCost
from services.simulator.attention_course import Course
from services.simulator.host import NO_LONGER, Host, Paced, Wanted

NOTHING = Wanted(0.0)


@dataclass(slots=True)
class HostShare:
    """Of those who use the same workers. ``busiest``: of a core, that the one takes who takes most;
    ``in_turns``: what replicas want whose workers have no core but theirs."""

    host: Host
    busiest: float = 0.0
    in_turns: Wanted = NOTHING

    def wanted(self, courses: Sequence[Course], rates: Sequence[float]) -> list[Wanted]:
        """At so many layers a second of each."""
        replicas = 0.0
        workers: dict[str, float] = {}
        for course, rate in zip(courses, rates, strict=True):
            layer = course.layer_cost(0)
            sequences = sum(each.sequences for each in course.rows)
            beside_s = self.host.beside_s(sequences) / course.engine.cost.layers
            replicas += rate * (layer.slice_s + beside_s)
            for share in layer.shares:
                for worker in share.workers:
                    workers[worker] = workers.get(worker, 0.0) + rate * share.attention_s
        self.busiest = max(workers.values(), default=0.0)
        taken = sum(workers.values())
        self.in_turns = Wanted(min(len(courses), replicas + taken))
        wanted = [Wanted(replicas), Wanted(taken, self.busiest)]
        return [each for each in wanted if each.cores > 0]

    def slowed(self, cost: LayerCost, layers: int, who: Paced) -> LayerCost:
        """As it comes out beside the others, of a step of so many layers by ``who``: passes of others make
        its slices longer, and attention, which reads memory as they do, by their share."""
        host, longer = self.host, self.host.longer_for(who)
        if not host.is_short and longer == NO_LONGER:
            return cost
        computed_s = (1 + longer.share) * cost.slice_s + longer.more_s / layers
        slice_s, attention_times = computed_s / host.pace(), (1 + longer.share) / host.pace(self.busiest)
        attention_s = max((each.attention_s for each in cost.shares), default=0.0)
        offline_s = cost.offline_s + slice_s - cost.slice_s + (attention_times - 1) * attention_s
        if host.is_short:
            together_s = computed_s + (1 + longer.share) * attention_s
            offline_s = (1 + host.config.turns_share) * together_s / host.level_if(who, self.in_turns)
        return cost._replace(
            slice_s=slice_s,
            alone_s=cost.alone_s - cost.offline_s + offline_s,
            offline_s=offline_s,
            shares=tuple(
                each._replace(attention_s=attention_times * each.attention_s) for each in cost.shares
            ),
        )
