"""What instances count between passes, as it is read off their metrics."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.instance_metrics import InstanceMetrics
from services.compare import pass_gaps
from services.compare.pass_gaps import Gaps, gaps_between, gaps_of


def test_an_instance_s_own_count_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = InstanceMetrics(registry)
    for gap_s in (0.001, 0.002, 0.0045):
        metrics.observe_gap(gap_s)
    monkeypatch.setattr(
        pass_gaps, "fetch", lambda url: generate_latest(registry) if url == "a/metrics" else b""
    )
    assert gaps_of(["a", "b"]) == {"a": (3, pytest.approx(0.0075)), "b": Gaps()}
    monkeypatch.undo()
    assert gaps_of([f"file://{tmp_path}/nowhere"]) == {}


def test_who_began_anew_or_was_not_there_is_left_out() -> None:
    before = {"a": Gaps(10, 0.02), "b": Gaps(50, 0.1)}
    anew = gaps_between(before, {"a": Gaps(14, 0.03), "b": Gaps(3, 0.01)})
    assert tuple(anew) == pytest.approx((4, 0.01))
    assert gaps_between(before, {"a": Gaps(20, 0.01)}) == Gaps(), "more passes since it began anew"
    came = gaps_between(before, {"b": Gaps(60, 0.15), "c": Gaps(7, 0.01)})
    assert tuple(came) == pytest.approx((10, 0.05))
    assert gaps_between({}, {}) == Gaps()
