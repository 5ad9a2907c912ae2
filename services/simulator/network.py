"""What services tell each other, and over which links instances' KV goes."""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from common.ids import InstanceId
from services.simulator.clock import Clock
from services.simulator.host import Host
from services.simulator.links import Link, Links
from services.simulator.timeline import SimulatedTimeline


@dataclass(slots=True, eq=False)
class Adapter:
    """Of one life of an instance: it sends and receives at the same time."""

    bytes_per_s: float
    outward: Link
    inward: Link


class LinkUse(NamedTuple):
    """Shares of what links could have carried each way."""

    outward: float
    inward: float


@dataclass(slots=True)
class Network:
    """``hop_s``: what a message takes, so that none overtakes another. ``timeline``: where it is kept what
    everyone did, if it is. ``host``: on which all run, if they share one."""

    clock: Clock
    links: Links
    hop_s: float
    timeline: SimulatedTimeline | None = None
    host: Host | None = None
    adapters: dict[InstanceId, Adapter] = field(default_factory=dict)
    _lives: list[tuple[InstanceId, Adapter]] = field(default_factory=list)
    _numbers: dict[InstanceId, int] = field(default_factory=dict)

    def add(self, instance_id: InstanceId, bytes_per_s: float) -> None:
        adapter = self.adapters[instance_id] = Adapter(bytes_per_s, Link(bytes_per_s), Link(bytes_per_s))
        self._lives.append((instance_id, adapter))
        self._numbers.setdefault(instance_id, len(self._numbers))

    def number_of(self, instance_id: InstanceId) -> int:
        """As instances came."""
        return self._numbers[instance_id]

    @property
    def names(self) -> tuple[InstanceId, ...]:
        """By their numbers."""
        return tuple(self._numbers)

    def tell(self, action: Callable[[], None]) -> None:
        """A message arrives."""
        clock = self.clock
        if self.hop_s > 0:
            clock.at(self.arrival_s(), action)
        else:
            clock.soon(action)

    def arrival_s(self) -> float:
        """Of a message that leaves now."""
        return self.clock.now + self.hop_s

    def send_kv(
        self,
        sender: InstanceId,
        receivers: Sequence[InstanceId],
        nbytes: float,
        done: Callable[[], None],
        fail: Callable[[], None],
        late: Callable[[], None] = lambda: None,
    ) -> None:
        """To each an equal part: the heads that it holds. ``done`` when all have arrived; ``fail``: one does
        not; ``late``: one takes long."""
        if len(receivers) == 1:
            links = (self.adapters[sender].outward, self.adapters[receivers[0]].inward)
            self.links.send(links, nbytes, done, fail, late)
            return
        left, has_failed = len(receivers), False

        def end(*, is_there: bool) -> None:
            nonlocal left, has_failed
            left -= 1
            has_failed |= not is_there
            if left == 0:
                (fail if has_failed else done)()

        for receiver in receivers:
            links = (self.adapters[sender].outward, self.adapters[receiver].inward)
            ends = partial(end, is_there=True), partial(end, is_there=False)
            self.links.send(links, nbytes / len(receivers), *ends, late)

    def use_of(self, instance_ids: Container[InstanceId], links_s: float) -> LinkUse:
        """By KV, of all lives of those, whose links were there for so many seconds together."""
        adapters = [adapter for instance_id, adapter in self._lives if instance_id in instance_ids]
        if links_s <= 0:
            return LinkUse(0.0, 0.0)
        outward_s = math.fsum(each.outward.carried_bytes / each.bytes_per_s for each in adapters)
        inward_s = math.fsum(each.inward.carried_bytes / each.bytes_per_s for each in adapters)
        return LinkUse(outward_s / links_s, inward_s / links_s)

    def pace(self, instance_id: InstanceId, share: float) -> None:
        """Its links have so much of the bandwidth that they came with."""
        adapter = self.adapters[instance_id]
        for link in (adapter.outward, adapter.inward):
            self.links.pace(link, share * adapter.bytes_per_s)

    def end(self, instance_id: InstanceId) -> None:
        """Of this life; what is on its way from or to it has failed."""
        adapter = self.adapters[instance_id]
        self.links.end(adapter.outward)
        self.links.end(adapter.inward)
