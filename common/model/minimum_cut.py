"""The least that must be kept between two halves of a computation: a minimum cut with capacities on values.

What is cut is a value, not an edge: a tensor with several consumers is kept once, so every value is split
into an entry and an exit and the arc between them carries its size. Arcs from a consumer back to what it
consumes are endless, which keeps the source side closed under predecessors: nothing is computed twice.
"""

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import networkx

Value = TypeVar("Value", bound=Hashable)

SOURCE, SINK = "source", "sink"


@dataclass(frozen=True, slots=True)
class Cut(Generic[Value]):
    """``before``: computed ahead of the cut. ``kept``: those of it that are used after, ``size`` together."""

    before: frozenset[Value]
    kept: tuple[Value, ...]
    size: int


class Uncuttable(Exception):
    """``value`` would have to be kept and cannot be."""

    def __init__(self, value: object) -> None:
        super().__init__(f"{value} cannot be kept")
        self.value = value


def minimum_cut(
    users: Mapping[Value, Sequence[Value]],
    sizes: Mapping[Value, int | None],
    sources: AbstractSet[Value],
    sinks: AbstractSet[Value],
) -> Cut[Value]:
    """``users``: the consumers of every value, in a topological order. ``sizes``: None if it cannot be kept.

    ``sources`` must hold their predecessors and ``sinks`` their successors; all other values may be on
    either side. Of equal cuts it is the latest: what it may compute early, it does. Raises Uncuttable.
    """
    free = [value for value in users if value not in sources and value not in sinks]
    late = _late_values(users, sizes, sources, sinks, free) if free else frozenset()
    before = frozenset(value for value in users if value not in sinks and value not in late)
    kept = tuple(
        value for value in users if value in before and any(user not in before for user in users[value])
    )
    total = 0
    for value in kept:
        size = sizes[value]
        if size is None:
            raise Uncuttable(value)
        total += size
    return Cut(before, kept, total)


def _late_values(
    users: Mapping[Value, Sequence[Value]],
    sizes: Mapping[Value, int | None],
    sources: AbstractSet[Value],
    sinks: AbstractSet[Value],
    free: Sequence[Value],
) -> frozenset[Value]:
    """The free values that the minimum cut leaves for after it."""
    network: Any = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))

    def entry(value: Value) -> object:
        return SOURCE if value in sources else SINK if value in sinks else ("entry", value)

    for value in users:
        is_forced = value in sources and any(user in sinks for user in users[value])
        if value in sinks or is_forced or all(user in sources for user in users[value]):
            continue
        leaving = ("exit", value)
        _connect(network, entry(value), leaving, sizes[value])
        for user in users[value]:
            _connect(network, leaving, entry(user), None)
            _connect(network, entry(user), entry(value), None)
    try:
        _, (early, _) = networkx.minimum_cut(network, SOURCE, SINK)
    except networkx.NetworkXUnbounded:
        raise Uncuttable(_uncuttable(network, sizes, sources)) from None
    return frozenset(value for value in free if entry(value) in network and entry(value) not in early)


def _connect(network: Any, tail: object, head: object, capacity: int | None) -> None:
    """An arc; of endless capacity without one. Nothing may flow into the source or out of the sink."""
    if tail == SINK or head == SOURCE:
        return
    if capacity is None:
        network.add_edge(tail, head)
    elif not network.has_edge(tail, head):
        network.add_edge(tail, head, capacity=capacity)


def _uncuttable(network: Any, sizes: Mapping[Value, int | None], sources: AbstractSet[Value]) -> Value:
    """The first value on an endless path from the source to the sink that cannot be kept."""
    endless = networkx.DiGraph((tail, head) for tail, head, data in network.edges(data=True) if not data)
    path = networkx.shortest_path(endless, SOURCE, SINK)
    values: list[Value] = [step[1] for step in path if isinstance(step, tuple)]
    return next(value for value in values if sizes[value] is None)
