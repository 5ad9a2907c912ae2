"""What engines did with their time in a run, as it is read off their metrics and the system."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.instance_metrics import InstanceMetrics
from services.compare import engine_times
from services.compare.engine_times import (
    Counted,
    EngineProcess,
    EngineTimes,
    PassCounts,
    counted_of,
    counts_of_all,
    times_between,
)

A, B, WORKER = EngineProcess("decode", 1, "a"), EngineProcess("decode", 2, "b"), EngineProcess("attention", 3)


def test_an_instance_s_own_count_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = InstanceMetrics(registry)
    for gap_s, decodes, prompts in ((0.001, 3, 0), (0.002, 3, 1), (0.0045, 0, 2)):
        metrics.observe_wait(0.01)
        metrics.observe_gap(gap_s, decodes, prompts)
    monkeypatch.setattr(
        engine_times, "fetch", lambda url: generate_latest(registry) if url == "a/metrics" else b""
    )
    found = {who: each.passes for who, each in counted_of([A, B, WORKER]).items()}
    assert found == {A: pytest.approx((3, 0.0075, 3, 6, 0.03)), B: PassCounts(), WORKER: None}


def test_who_does_not_answer_is_left_out(tmp_path: Path) -> None:
    assert counted_of([EngineProcess("decode", 1, f"file://{tmp_path}/nowhere")]) == {}


def test_times_are_added_up_by_role_and_passes_of_who_began_anew_are_not() -> None:
    before = {
        A: Counted(1.0, PassCounts(10, 0.02, 1, 30, 0.1)),
        B: Counted(2.0, PassCounts(50, 0.1, 5, 9, 0.2)),
    }
    after = {
        A: Counted(1.5, PassCounts(14, 0.03, 2, 42, 0.3)),
        B: Counted(2.5, PassCounts(3, 0.01, 0, 2, 0.3)),
    }
    [found] = times_between(before, after)
    assert (found.role, found.computed_s) == ("decode", 1.0)
    assert found.passes == pytest.approx((4, 0.01, 1, 12, 0.2))
    worker = {WORKER: Counted(1.0)}
    assert times_between(before | worker, worker) == (EngineTimes("attention", 0.0),)
    both = times_between(before | worker, after | {WORKER: Counted(4.0)})
    assert both == (EngineTimes("attention", 3.0), found)


def test_counts_of_several_are_theirs_together() -> None:
    found = counts_of_all([PassCounts(1, 0.5, 2, 3, 4.0), PassCounts(10, 1.0, 20, 30, 40.0)])
    assert found == PassCounts(11, 1.5, 22, 33, 44.0)
    assert counts_of_all([]) == PassCounts()
