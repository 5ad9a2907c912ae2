"""Links that carry KV: each shares its bandwidth fairly among the transfers that cross it at the time.

A transfer crosses its sender's link and its receiver's. Bandwidths are those of max-min fairness: nobody can
have more without somebody who has no more than that having less.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.simulator.clock import Clock, Timer


@dataclass(slots=True, eq=False)
class Link:
    """One direction. ``carried_bytes``: since the start."""

    bytes_per_s: float
    flows: "dict[Flow, None]" = field(default_factory=dict)
    carried_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s = {self.bytes_per_s}: must be over 0")


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer. ``left_bytes`` were left at ``since_s``, from when on it has had ``bytes_per_s``."""

    links: tuple[Link, ...]
    left_bytes: float
    since_s: float
    done: Callable[[], None]
    bytes_per_s: float = 0.0
    timer: Timer | None = None


@dataclass(slots=True)
class Links:
    """All transfers of a cluster. ``latency_s``: until the first byte arrives."""

    clock: Clock
    latency_s: float = 0.0

    def send(self, links: tuple[Link, ...], nbytes: float, done: Callable[[], None]) -> None:
        """``done`` is called when the last byte has arrived."""
        if self.latency_s > 0:
            self.clock.after(self.latency_s, lambda: self._begin(links, nbytes, done))
        else:
            self._begin(links, nbytes, done)

    def _begin(self, links: tuple[Link, ...], nbytes: float, done: Callable[[], None]) -> None:
        flow = Flow(links, nbytes, self.clock.now, done)
        for link in links:
            link.flows[flow] = None
            link.carried_bytes += nbytes
        self._share(flow)

    def _end(self, flow: Flow) -> None:
        for link in flow.links:
            del link.flows[flow]
        self._share(flow)
        flow.done()

    def _share(self, changed: Flow) -> None:
        """Anew among all that share a link with ``changed``, or with one of those, and so on."""
        flows: dict[Flow, None] = {}
        links: dict[Link, None] = dict.fromkeys(changed.links)
        waiting = list(links)
        while waiting:
            for flow in waiting.pop().flows:
                if flow not in flows:
                    flows[flow] = None
                    fresh = [link for link in flow.links if link not in links]
                    links.update(dict.fromkeys(fresh))
                    waiting += fresh
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
        flow.timer = self.clock.after(flow.left_bytes / bytes_per_s, lambda: self._end(flow))


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
