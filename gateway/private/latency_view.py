"""What the clients of a gateway saw within the last minute: percentiles, goodput and tokens a second.

Pure but for being told the time; what the words mean is ``common.latency``'s.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from common.latency import Distribution, ServiceObjectives, describe, goodput_per_s, has_met
from gateway.service_levels import Ended, ServiceLevels

RATE_WINDOW_S = 5.0
"""Over which tokens a second are counted: long enough to be steady, short enough to follow the load."""
ALL = "all"


class ClassLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests of one class that ended, failed or were refused; ``met``: that kept every objective.
    ``tokens_per_s``: that they drew. ``objectives`` is None of all classes together."""

    service_class: str
    requests: int
    met: int
    attainment: float | None
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    tokens_per_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    objectives: ServiceObjectives | None


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens_per_s``: that went to clients within the last seconds, also of requests that go on."""

    window_s: float
    tokens_per_s: float
    open_requests: int
    classes: list[ClassLatency]
    all: ClassLatency


@dataclass(slots=True)
class TokenRate:
    """Of a counter that only grows, looked at now and then."""

    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def look(self, total: float, now: float) -> float:
        """Tokens a second since the latest look that is at least ``RATE_WINDOW_S`` old, or the first."""
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_WINDOW_S:
            self._seen.popleft()
        then_s, then_total = self._seen[0]
        return 0.0 if now <= then_s else (total - then_total) / (now - then_s)


def latency_view(levels: ServiceLevels, now: float, tokens_per_s: float, open_requests: int) -> LatencyView:
    recent, window_s = levels.recent(now), levels.window_s(now)
    wanted = levels.objectives
    classes = [
        _latency_of(name, [each for each in recent if each.service_class == name], wanted, window_s)
        for name in wanted
    ]
    return LatencyView(
        window_s=window_s,
        tokens_per_s=tokens_per_s,
        open_requests=open_requests,
        classes=classes,
        all=_latency_of(ALL, recent, wanted, window_s),
    )


def _latency_of(
    name: str, ended: list[Ended], wanted: Mapping[str, ServiceObjectives], window_s: float
) -> ClassLatency:
    met = [each for each in ended if each.latency and has_met(each.latency, wanted[each.service_class])]
    return ClassLatency(
        service_class=name,
        requests=len(ended),
        met=len(met),
        attainment=len(met) / len(ended) if ended else None,
        goodput_requests_per_s=goodput_per_s(len(met), window_s),
        goodput_tokens_per_s=_tokens(met) / window_s,
        tokens_per_s=_tokens(ended) / window_s,
        ttft_s=describe(each.latency.ttft_s for each in ended if each.latency),
        tpot_s=describe(
            each.latency.tpot_s for each in ended if each.latency and each.latency.tpot_s is not None
        ),
        objectives=wanted.get(name),
    )


def _tokens(ended: Iterable[Ended]) -> int:
    return sum(each.tokens for each in ended)
