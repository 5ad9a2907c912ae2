"""How fast batches get on that share model replicas, attention workers and links: layers a second of each.

Replicas serve their ready batches by turns, and workers one after another: who shares is served as often as
the others. In the long run that is max-min fairness of rates: nobody can go faster without somebody
going slower who is no faster. Of equal batches it is what ``scheduler.policy.staggering`` says.
Nobody waits in it but for what is used up: batches that meet by chance are apart after their first layers.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from scheduler.policy.staggering import Staggering
from services.simulator.attention_cost import LayerCost


class Demand(NamedTuple):
    """A batch's, of each layer: ``alone_s`` at least, and ``uses`` so many seconds of what is shared."""

    alone_s: float
    uses: tuple[tuple[Hashable, float], ...]


def demand_of(cost: LayerCost, turns: Staggering, owner: Hashable, *, is_offline: bool = False) -> Demand:
    """Of a batch of ``owner``'s, whose batches share model replicas and those's links; ``is_offline``: over a
    network that takes no time."""
    uses: list[tuple[Hashable, float]] = [(each.worker, each.attention_s) for each in cost.shares]
    if not turns.is_fixed:
        uses.append((owner, cost.slice_s / turns.replicas))
    if is_offline:
        return Demand(cost.offline_s, tuple(uses))
    uses.append(((owner, "out"), cost.outward_s / turns.replicas))
    uses.append(((owner, "in"), cost.inward_s / turns.replicas))
    uses += [((each.worker, "in"), each.inward_s) for each in cost.shares]
    uses += [((each.worker, "out"), each.outward_s) for each in cost.shares]
    return Demand(cost.alone_s, tuple(uses))


def layer_rates(demands: Sequence[Demand]) -> list[float]:
    """Layers a second of each. Raises ZeroDivisionError for a layer that takes no time."""
    if len(demands) == 1:
        return [1.0 / demands[0].alone_s]
    rates = [0.0] * len(demands)
    waiting = set(range(len(demands)))
    room: dict[Hashable, float] = {}
    users: dict[Hashable, dict[int, float]] = {}
    for index, demand in enumerate(demands):
        for shared, seconds in demand.uses:
            if seconds > 0:
                room[shared] = 1.0
                members = users.setdefault(shared, {})
                members[index] = members.get(index, 0.0) + seconds
    while waiting:
        bound = {
            shared: room[shared] / sum(members[each] for each in members if each in waiting)
            for shared, members in users.items()
            if not waiting.isdisjoint(members)
        }
        alone = max(demands[each].alone_s for each in waiting)
        rate = min(1.0 / alone, *bound.values()) if bound else 1.0 / alone
        settled = {each for each in waiting if 1.0 / demands[each].alone_s <= rate}
        for shared, most in bound.items():
            if most <= rate:
                settled |= waiting & users[shared].keys()
        for each in settled:
            rates[each] = rate
            for shared, members in users.items():
                if each in members:
                    room[shared] = max(0.0, room[shared] - rate * members[each])
        waiting -= settled
    return rates
