"""Attainment and goodput of the last minute."""

import pytest

from common.latency import RequestLatency, ServiceObjectives
from gateway.service_levels import WINDOW_S, Ended, ServiceLevels, add_up

OBJECTIVES = {"default": ServiceObjectives(ttft_s=1.0, tpot_s=0.1), "batch": ServiceObjectives(ttft_s=60.0)}


def ended(at_s: float, service_class: str, ttft_s: float | None, tokens: int = 10) -> Ended:
    latency = None if ttft_s is None else RequestLatency(ttft_s, 0.05, None, ttft_s + 1.0)
    return Ended(at_s, service_class, latency, tokens)


def test_each_class_is_judged_by_its_own_objectives_over_the_last_minute() -> None:
    levels = ServiceLevels(OBJECTIVES, since_s=0.0)
    levels.add(ended(1.0, "default", 0.5))
    for at_s, service_class, ttft_s in ((100.0, "default", 0.5), (110.0, "default", 5.0)):
        levels.add(ended(at_s, service_class, ttft_s))
    levels.add(ended(111.0, "batch", 5.0))
    levels.add(ended(112.0, "batch", None))
    default, batch = levels.read(130.0)
    assert (default.requests, default.met, default.attainment) == (2, 1, 0.5)
    assert (batch.requests, batch.met, batch.met_tokens, batch.attainment) == (2, 1, 10, 0.5)
    assert batch.goodput_requests_per_s == pytest.approx(1 / WINDOW_S)
    assert batch.goodput_tokens_per_s == pytest.approx(10 / WINDOW_S)


def test_a_class_without_requests_has_no_attainment_and_no_goodput() -> None:
    [default, batch] = ServiceLevels(OBJECTIVES, since_s=0.0).read(5.0)
    assert (default.attainment, default.goodput_requests_per_s) == (None, 0.0)
    assert (batch.service_class, batch.window_s) == ("batch", 5.0)


def test_several_gateways_are_added_up_by_class() -> None:
    one, other = ServiceLevels(OBJECTIVES, since_s=0.0), ServiceLevels(OBJECTIVES, since_s=20.0)
    one.add(ended(29.0, "default", 0.5))
    other.add(ended(29.0, "default", 2.0))
    default, batch = add_up(one.read(30.0) + other.read(30.0))
    assert (default.requests, default.met, default.window_s) == (2, 1, 30.0)
    assert batch.requests == 0
