"""Links that carry KV: each shares its bandwidth fairly among the transfers that cross it at the time.

A transfer crosses its sender's link and its receiver's. Bandwidths are those of max-min fairness: nobody can
have more without somebody who has no more than that having less. A link may change its bandwidth, down to
nothing, and end: with it every transfer on it does.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from services.simulator.clock import Clock, Timer

NEVER_GIVEN_UP_S = 1e9


@dataclass(slots=True, eq=False)
class Link:
    """One direction. ``carried_bytes``: since the start, with what is under way. ``is_over``: who was at its
    end is gone."""

    bytes_per_s: float
    flows: "dict[Flow, None]" = field(default_factory=dict)
    carried_bytes: float = 0.0
    is_over: bool = False

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s = {self.bytes_per_s}: must be over 0")


class Flow(msgspec.Struct, eq=False):
    """One transfer. ``left_bytes`` were left at ``since_s``, from when on it has had ``bytes_per_s``. After
    ``until_s`` it is given up; ``late`` is called where it is not over at ``late_s``."""

    links: tuple[Link, ...]
    left_bytes: float
    since_s: float
    done: Callable[[], None]
    fail: Callable[[], None] = lambda: None
    late: Callable[[], None] = lambda: None
    until_s: float = NEVER_GIVEN_UP_S
    late_s: float = NEVER_GIVEN_UP_S
    bytes_per_s: float = 0.0
    timer: Timer | None = None
    late_timer: Timer | None = None


@dataclass(slots=True)
class Links:
    """All transfers of a cluster. ``latency_s``: until the first byte arrives. One that is not over after
    ``deadline_s`` has failed, and after ``suspect_after_s`` is late."""

    clock: Clock
    latency_s: float = 0.0
    deadline_s: float = NEVER_GIVEN_UP_S
    suspect_after_s: float = NEVER_GIVEN_UP_S

    def send(
        self,
        links: tuple[Link, ...],
        nbytes: float,
        done: Callable[[], None],
        fail: Callable[[], None] = lambda: None,
        late: Callable[[], None] = lambda: None,
    ) -> None:
        """``done`` is called when the last byte has arrived, or ``fail`` when that cannot be any more;
        ``late`` before that, where it takes long."""
        now = self.clock.now
        until_s, late_s = now + self.deadline_s, now + self.suspect_after_s
        flow = Flow(links, nbytes, now, done, fail, late, until_s, late_s)
        if self.latency_s > 0:
            self.clock.after(self.latency_s, lambda: self._begin(flow))
        else:
            self._begin(flow)

    def pace(self, link: Link, bytes_per_s: float) -> None:
        """Its bandwidth from now on; 0: nothing crosses it."""
        link.bytes_per_s = bytes_per_s
        self._share((link,))

    def end(self, link: Link) -> None:
        """Nothing crosses it any more, and what does has failed."""
        link.is_over = True
        flows = list(link.flows)
        for flow in flows:
            self._break_off(flow)
        self._share({other: None for flow in flows for other in flow.links})
        for flow in flows:
            self.clock.soon(flow.fail)

    def _begin(self, flow: Flow) -> None:
        flow.since_s = self.clock.now
        links = flow.links
        if True in [link.is_over for link in links]:
            self.clock.soon(flow.fail)
            return
        flows = 0
        for link in links:
            link.flows[flow] = None
            link.carried_bytes += flow.left_bytes
            flows += len(link.flows)
        if flows == len(links):
            self._pace(flow, min([link.bytes_per_s for link in links]))
        else:
            self._share(links)

    def _end(self, flow: Flow) -> None:
        self._take_off(flow)
        self._share(flow.links)
        flow.done()

    def _give_up(self, flow: Flow) -> None:
        self._break_off(flow)
        self._share(flow.links)
        flow.fail()

    def _break_off(self, flow: Flow) -> None:
        """What has not crossed its links does not count as carried."""
        self._take_off(flow)
        left_bytes = max(0.0, flow.left_bytes - flow.bytes_per_s * (self.clock.now - flow.since_s))
        for link in flow.links:
            link.carried_bytes -= left_bytes

    def _take_off(self, flow: Flow) -> None:
        for timer in (flow.timer, flow.late_timer):
            if timer is not None:
                self.clock.cancel(timer)
        for link in flow.links:
            del link.flows[flow]

    def _share(self, changed: Iterable[Link]) -> None:
        """Anew among all that cross one of these, or share a link with one that does, and so on."""
        flows: dict[Flow, None] = {}
        links: dict[Link, None] = dict.fromkeys(changed)
        waiting = list(links)
        while waiting:
            for flow in waiting.pop().flows:
                if flow not in flows:
                    flows[flow] = None
                    fresh = [link for link in flow.links if link not in links]
                    links.update(dict.fromkeys(fresh))
                    waiting += fresh
        if flows:
            for flow, bytes_per_s in fair_rates(flows, links).items():
                self._pace(flow, bytes_per_s)

    def _pace(self, flow: Flow, bytes_per_s: float) -> None:
        if flow.timer is not None:
            if bytes_per_s == flow.bytes_per_s:
                return
            self.clock.cancel(flow.timer)
        now = self.clock.now
        flow.left_bytes = max(0.0, flow.left_bytes - flow.bytes_per_s * (now - flow.since_s))
        flow.since_s, flow.bytes_per_s = now, bytes_per_s
        due_s = now + flow.left_bytes / bytes_per_s if bytes_per_s > 0 else math.inf
        if due_s <= flow.until_s and due_s < math.inf:
            flow.timer = self.clock.at(due_s, lambda: self._end(flow))
        else:
            flow.timer = self.clock.at(flow.until_s, lambda: self._give_up(flow))
        if due_s > flow.late_s and flow.late_timer is None:
            flow.late_timer = self.clock.at(flow.late_s, flow.late)


def fair_rates(flows: dict[Flow, None], links: dict[Link, None]) -> dict[Flow, float]:
    """Progressive filling: the link that offers least to each of its flows settles these, and so on. Every
    flow of every link is among ``flows``."""
    if len(flows) == 1:
        [flow] = flows
        return {flow: min(link.bytes_per_s for link in flow.links)}
    rates: dict[Flow, float] = {}
    room = {link: link.bytes_per_s for link in links}
    unsettled = {link: len(link.flows) for link in links if link.flows}
    while unsettled:
        tightest = min(unsettled, key=lambda link: room[link] / unsettled[link])
        share = room[tightest] / unsettled[tightest]
        for flow in tightest.flows:
            if flow in rates:
                continue
            rates[flow] = share
            for link in flow.links:
                room[link] = max(0.0, room[link] - share)
                unsettled[link] -= 1
        unsettled = {link: count for link, count in unsettled.items() if count > 0}
    return rates
