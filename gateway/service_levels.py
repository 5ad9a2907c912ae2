"""What was promised to the requests of the last minute, and what was kept: attainment and goodput by class.

Pure but for being told the time; what the words mean is ``common.latency``'s. ``/service-levels`` answers
from it, and ``lamella status``, which adds up several gateways.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from common.latency import RequestLatency, ServiceObjectives, goodput_per_s, has_met, slo_attainment

WINDOW_S = 60.0
MOST_ENDED = 1 << 16
"""Of whom it is remembered: beyond a thousand ends a second the window is shorter than it says."""


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Of one class, over the last ``window_s``. ``requests`` ended, failed or were refused; ``met`` of them
    kept every objective and drew ``met_tokens`` tokens. The objectives are as configured, in seconds."""

    service_class: str
    ttft_s: float | None
    tpot_s: float | None
    end_to_end_s: float | None
    window_s: float
    requests: int
    met: int
    met_tokens: int

    @property
    def attainment(self) -> float | None:
        """Share of the requests; None where there was none."""
        return self.met / self.requests if self.requests else None

    @property
    def goodput_requests_per_s(self) -> float:
        return goodput_per_s(self.met, self.window_s)

    @property
    def goodput_tokens_per_s(self) -> float:
        return goodput_per_s(self.met_tokens, self.window_s)


@dataclass(frozen=True, slots=True)
class Ended:
    """``latency`` None: it failed or was refused."""

    at_s: float
    service_class: str
    latency: RequestLatency | None
    tokens: int


@dataclass(slots=True)
class ServiceLevels:
    """``since_s``: when it began to look."""

    objectives: Mapping[str, ServiceObjectives]
    since_s: float
    _ended: deque[Ended] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))

    def add(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._forget(ended.at_s)

    def window_s(self, now: float) -> float:
        """Over which it can tell."""
        return min(WINDOW_S, max(1.0, now - self.since_s))

    def recent(self, now: float) -> list[Ended]:
        """The requests of the last minute."""
        self._forget(now)
        return list(self._ended)

    def read(self, now: float) -> list[ServiceLevel]:
        """Every class, also those of which no request came."""
        self._forget(now)
        window_s = self.window_s(now)
        return [self._level(service_class, window_s) for service_class in self.objectives]

    def _level(self, service_class: str, window_s: float) -> ServiceLevel:
        wanted = self.objectives[service_class]
        ended = [each for each in self._ended if each.service_class == service_class]
        latencies = [each.latency for each in ended if each.latency is not None]
        attainment = slo_attainment(latencies, len(ended) - len(latencies), wanted)
        return ServiceLevel(
            service_class=service_class,
            ttft_s=wanted.ttft_s,
            tpot_s=wanted.tpot_s,
            end_to_end_s=wanted.end_to_end_s,
            window_s=window_s,
            requests=len(ended),
            met=0 if attainment is None else attainment.met,
            met_tokens=sum(each.tokens for each in ended if each.latency and has_met(each.latency, wanted)),
        )

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0].at_s < now - WINDOW_S:
            self._ended.popleft()


def add_up(levels: Iterable[ServiceLevel]) -> list[ServiceLevel]:
    """Of several gateways, by class. The longest of their windows stands for all."""
    totals: dict[str, ServiceLevel] = {}
    for level in levels:
        known = totals.get(level.service_class)
        totals[level.service_class] = level if known is None else _sum(known, level)
    return list(totals.values())


def _sum(one: ServiceLevel, other: ServiceLevel) -> ServiceLevel:
    return msgspec.structs.replace(
        one,
        window_s=max(one.window_s, other.window_s),
        requests=one.requests + other.requests,
        met=one.met + other.met,
        met_tokens=one.met_tokens + other.met_tokens,
    )
