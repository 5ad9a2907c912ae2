"""Percentiles, goodput and tokens a second of the last minute."""

import pytest

from common.latency import RequestLatency, ServiceObjectives
from gateway.private.latency_view import RATE_WINDOW_S, TokenRate, latency_view
from gateway.service_levels import WINDOW_S, Ended, ServiceLevels

OBJECTIVES = {"default": ServiceObjectives(ttft_s=1.0), "batch": ServiceObjectives(ttft_s=60.0)}


def ended(at_s: float, service_class: str, ttft_s: float | None, tokens: int = 6) -> Ended:
    latency = None if ttft_s is None else RequestLatency(ttft_s, 0.05, None, ttft_s + 1.0)
    return Ended(at_s, service_class, latency, tokens)


def test_each_class_and_all_of_them_have_percentiles_and_goodput() -> None:
    levels = ServiceLevels(OBJECTIVES, since_s=0.0)
    for at_s, ttft_s in ((1.0, 0.5), (100.0, 0.5), (101.0, 0.7), (102.0, 5.0), (103.0, None)):
        levels.add(ended(at_s, "default", ttft_s))
    levels.add(ended(104.0, "batch", 5.0))
    view = latency_view(levels, 110.0, 12.5, open_requests=3)
    default, batch = view.classes
    assert (view.window_s, view.tokens_per_s, view.open_requests) == (WINDOW_S, 12.5, 3)
    assert (default.requests, default.met, default.attainment) == (4, 2, 0.5)
    assert default.ttft_s is not None
    assert (default.ttft_s.count, default.ttft_s.p50_s) == (3, 0.7)
    assert default.goodput_tokens_per_s == pytest.approx(12 / WINDOW_S)
    assert (batch.requests, batch.met, batch.objectives) == (1, 1, OBJECTIVES["batch"])
    assert (view.all.requests, view.all.met, view.all.objectives) == (5, 3, None)


def test_a_class_without_requests_has_no_percentiles() -> None:
    view = latency_view(ServiceLevels(OBJECTIVES, since_s=0.0), 5.0, 0.0, open_requests=0)
    assert (view.all.ttft_s, view.all.tpot_s, view.all.attainment) == (None, None, None)


def test_tokens_a_second_are_those_of_the_last_seconds() -> None:
    rate = TokenRate()
    assert rate.look(0.0, 0.0) == 0.0
    for at_s in range(1, 30):
        rate.look(10.0 * at_s, float(at_s))
    assert rate.look(300.0, 30.0) == pytest.approx(10.0)
    assert rate.look(300.0, 30.0 + RATE_WINDOW_S) == 0.0
