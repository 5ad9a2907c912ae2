"""How fast batches get on that share model replicas, attention workers and links: layers a second of each.

Replicas serve their ready batches by turns, and workers one after another: who shares is served as often as
the others. In the long run that is max-min fairness of rates: nobody can go faster without somebody
going slower who is no faster. Of equal batches it is what ``scheduler.policy.staggering`` says.
Nobody waits in it but for what is used up: batches that meet by chance are apart after their first layers.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from scheduler.policy.staggering import Staggering
from services.simulator.attention_cost import LayerCost, WorkerShare

NEARLY_ALL = 1 - 1e-9
"""Of what is shared: who uses less of it keeps nobody waiting."""


class Demand(NamedTuple):
    """A batch's, of each layer: ``alone_s`` at least, and ``uses`` so many seconds of what is shared."""

    alone_s: float
    uses: tuple[tuple[Hashable, float], ...]


class Batch(NamedTuple):
    """One of ``owner``'s, whose batches share model replicas and those's links."""

    cost: LayerCost
    turns: Staggering
    owner: Hashable


def demands_of(batches: Sequence[Batch], *, is_offline: bool = False) -> list[Demand]:
    """One a batch, in order. ``is_offline``: over a network that takes no time."""
    groups = {share.workers for batch in batches for share in batch.cost.shares}
    # Workers of whom all batches use the same, or none, are as good as one.
    are_apart = sum(map(len, groups)) == len(frozenset().union(*groups))
    return [_demand_of(batch, are_apart=are_apart, is_offline=is_offline) for batch in batches]


def _demand_of(batch: Batch, *, are_apart: bool, is_offline: bool) -> Demand:
    cost, turns, owner = batch
    shares: list[tuple[Hashable, WorkerShare]] = [(each.workers, each) for each in cost.shares]
    if not are_apart:
        shares = [(worker, each) for each in cost.shares for worker in each.workers]
    uses: list[tuple[Hashable, float]] = [(whose, each.attention_s) for whose, each in shares]
    if not turns.is_fixed:
        uses.append((owner, cost.slice_s / turns.replicas))
    if is_offline:
        return Demand(cost.offline_s, tuple(uses))
    uses.append(((owner, "out"), cost.outward_s / turns.replicas))
    uses.append(((owner, "in"), cost.inward_s / turns.replicas))
    uses += [((whose, "in"), each.inward_s) for whose, each in shares]
    uses += [((whose, "out"), each.outward_s) for whose, each in shares]
    return Demand(cost.alone_s, tuple(uses))


def layer_rates(demands: Sequence[Demand]) -> list[float]:
    """Layers a second of each. Raises ZeroDivisionError for a layer that takes no time."""
    alone = [1.0 / each.alone_s for each in demands]
    if len(demands) == 1:
        return alone
    rates = [0.0] * len(demands)
    waiting = list(range(len(demands)))
    users = _scarce(demands, alone)
    room = [1.0] * len(users)
    while waiting:
        # Of whom nobody is served any more nothing is scarce.
        bound = [
            left / used if (used := sum([members[each] for each in waiting])) > 0 else math.inf
            for left, members in zip(room, users, strict=True)
        ]
        rate = min([*bound, *[alone[each] for each in waiting]])
        full = [members for most, members in zip(bound, users, strict=True) if most <= rate]
        left_over = []
        for each in waiting:
            if alone[each] <= rate or any(members[each] > 0 for members in full):
                rates[each] = rate
                for place, members in enumerate(users):
                    room[place] = max(0.0, room[place] - rate * members[each])
            else:
                left_over.append(each)
        waiting = left_over
    return rates


def _scarce(demands: Sequence[Demand], alone: Sequence[float]) -> list[list[float]]:
    """Of each thing that not all can have as often as they could take it: by demand, the seconds that it uses
    of it a layer."""
    users: dict[Hashable, list[float]] = {}
    for index, demand in enumerate(demands):
        for shared, seconds in demand.uses:
            members = users.get(shared)
            if members is None:
                members = users[shared] = [0.0] * len(demands)
            members[index] += seconds
    return [
        members
        for members in users.values()
        if sum([seconds * most for seconds, most in zip(members, alone, strict=True)]) > NEARLY_ALL
    ]
