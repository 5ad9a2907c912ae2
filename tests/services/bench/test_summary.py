"""Figures from outcomes, worked by hand."""

from array import array
from dataclasses import replace

import pytest

from common.latency import ServiceObjectives
from services.bench.client import Failure, Outcome
from services.bench.plan import Truncations
from services.bench.stream import Usage
from services.bench.summary import LoadResult, Window, collect_samples, load_window, summarize

SERVED = Outcome(
    class_name="foreground",
    index=0,
    prompt_tokens=10,
    output_tokens=3,
    arrival_s=100.0,
    due_s=100.0,
    sent_s=100.0,
    finished_s=101.0,
    token_times_s=array("d", [100.4, 100.6, 101.0]),
    usage=Usage(10, 3),
    has_done=True,
    failure=None,
    is_cut=False,
)
SLOW = replace(
    SERVED, index=1, token_times_s=array("d", [101.5, 101.6, 102.0]), sent_s=100.02, finished_s=102.0
)
REFUSED = replace(
    SERVED,
    index=2,
    token_times_s=array("d"),
    usage=None,
    finished_s=100.1,
    failure=Failure("http_503", "full"),
)
CUT = replace(
    SERVED,
    index=3,
    token_times_s=array("d", [101.8, 101.9]),
    finished_s=101.9,
    usage=None,
    has_done=False,
    is_cut=True,
)


def figures(outcomes: list[Outcome], objectives: ServiceObjectives | None = None) -> LoadResult:
    window = load_window(outcomes)
    assert window is not None
    return summarize("foreground", "by hand", outcomes, window, objectives, Truncations())[0]


def test_a_load_worked_by_hand() -> None:
    load = figures([SERVED, SLOW, REFUSED], ServiceObjectives(ttft_s=1.0, tpot_s=0.3))
    assert load.elapsed_s == pytest.approx(2.0)
    assert (load.requests, load.served, load.failed, load.cut) == (3, 2, 1, 0)
    assert load.ttft is not None
    assert load.ttft.p50_s == pytest.approx((0.4 + 1.5) / 2)
    assert load.tpot is not None
    assert load.tpot.maximum_s == pytest.approx(0.3)
    assert load.tbt is not None
    assert load.tbt.count == 4
    assert load.tbt.maximum_s == pytest.approx(0.4)
    assert load.end_to_end is not None
    assert load.end_to_end.maximum_s == pytest.approx(2.0)
    assert load.output_tokens_per_s == pytest.approx(3.0)
    assert load.prompt_tokens_per_s == pytest.approx(10.0)
    assert load.attainment is not None
    assert load.attainment.share == pytest.approx(1 / 3)
    assert load.goodput_per_s == pytest.approx(0.5)
    assert (load.late, load.failures[0].kind, load.failures[0].count) == (1, "http_503", 1)


def test_a_cut_request_gives_its_gaps_and_is_neither_served_nor_failed() -> None:
    load = figures([SERVED, CUT], ServiceObjectives(ttft_s=1.0))
    assert (load.served, load.failed, load.cut) == (1, 0, 1)
    assert load.tbt is not None
    assert load.tbt.count == 3
    assert load.attainment is not None
    assert load.attainment.requests == 1


def test_only_what_lies_in_the_window_is_measured() -> None:
    samples = collect_samples([SERVED, SLOW], Window(100.5, 101.55))
    assert samples.tbt_s == pytest.approx((0.4,))
    assert samples.ttft_s == ()
    assert samples.end_to_end_s == ()


def test_tokens_the_server_counts_beat_events() -> None:
    coalesced = replace(SERVED, token_times_s=array("d", [100.4, 101.0]), usage=Usage(10, 7))
    load = figures([coalesced])
    assert load.output_tokens == 7
    assert load.tokens_per_event == 3.5
    assert load.tpot is not None
    assert load.tpot.mean_s == pytest.approx(0.1)
