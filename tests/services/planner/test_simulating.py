"""Probes in the simulator: bounds are never beaten, hopeless runs end as they would have, backlogs are
seen."""

from dataclasses import replace
from itertools import pairwise

import pytest

from common.latency import ServiceObjectives
from common.messages import Role
from common.shapes import LLAMA3_8B, OPT_13B
from services.bench.traces import TraceRequest
from services.planner.bounds import capacity_bound
from services.planner.candidates import InstanceKind, PoolPlan
from services.planner.goodput import served_by
from services.planner.probes import Phase, Probe
from services.planner.simulating import Conditions, left_share, run_probe, slowdowns_of, speed_of
from services.planner.workload import spaced, workload_of
from services.simulator.records import Records

GOAL = 0.9
ROWS = tuple(TraceRequest(None, 200 + 97 * number % 900, 5 + 31 * number % 120) for number in range(2_500))
CONDITIONS = Conditions(
    shape=LLAMA3_8B, rows=ROWS, objectives=ServiceObjectives(ttft_s=1.0, tpot_s=0.05), goal=GOAL
)


def kind_of(role: Role, **keys: object) -> InstanceKind:
    return InstanceKind(role=role, device="a100", **keys)  # type: ignore[arg-type]


KINDS = (
    kind_of("mixed"),
    kind_of("mixed", max_decode_batch=32),
    kind_of("mixed", mixed_policy="prefill_first", prefill_batching="saturation", chunk_tokens=4096),
    kind_of("mixed", mixed_policy="splitwise", prefill_batching="saturation", chunk_tokens=2048),
    kind_of("mixed", mixed_policy="orca", chunk_tokens=4096),
    kind_of("mixed", pipeline=2),
    kind_of("prefill"),
    kind_of("prefill", tensor=2, chunk_tokens=2048),
    kind_of("prefill", pipeline=2),
    kind_of("decode", max_decode_batch=32),
    kind_of("decode", tensor=2),
    kind_of("decode", pipeline=2, max_decode_batch=64),
    kind_of("decode", attention_device="h20", attention_workers=1, max_decode_batch=64),
    kind_of("decode", attention_device="h20", attention_workers=2, staggered_batches=2, max_decode_batch=128),
)


def probe_of(kind: InstanceKind, rate_per_s: float, requests: int, phase: Phase = "whole") -> Probe:
    pools = (PoolPlan(kind=kind, count=1),)
    return Probe(pools=pools, rate_per_s=rate_per_s, requests=requests, phase=phase)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_kind_serves_less_than_its_bound_and_more_than_a_third_of_it(kind: InstanceKind) -> None:
    bound = capacity_bound(kind, speed_of(kind, CONDITIONS), workload_of(ROWS), CONDITIONS.objectives, GOAL)
    phase: Phase = "whole" if kind.role == "mixed" else kind.role
    served = served_by(GOAL)
    assert not served(run_probe(probe_of(kind, bound.rate_per_s, len(ROWS), phase), CONDITIONS))
    assert served(run_probe(probe_of(kind, bound.rate_per_s / 3, 400, phase), CONDITIONS))


def test_a_hopeless_run_ends_with_the_same_answer() -> None:
    kind = kind_of("mixed")
    probe = probe_of(kind, 60.0, 400)
    cut, whole = (run_probe(probe, replace(CONDITIONS, goal=goal)) for goal in (0.9, None))
    assert cut.pools == ()
    assert whole.pools
    # What is sure to be missed early is part of what is missed in the end.
    assert whole.attainment <= cut.attainment < 0.9


def test_the_other_phase_takes_no_time() -> None:
    prompts = run_probe(probe_of(kind_of("prefill"), 5.0, 100, "prefill"), CONDITIONS)
    assert prompts.tpot_s == ()
    assert prompts.ttft_s == prompts.end_to_end_s
    tokens = run_probe(probe_of(kind_of("decode"), 5.0, 100, "decode"), CONDITIONS)
    assert tokens.ttft_s[2] < 0.01 < tokens.end_to_end_s[0]


def records_of(ends_after_s: list[float]) -> Records:
    """One comes every second."""
    records = Records()
    for number, after_s in enumerate(ends_after_s):
        records.begin(float(number), 10, 10)
        records.end(number, "done", number + after_s)
    return records


def test_a_backlog_that_grows_is_seen_and_one_that_stays_is_not() -> None:
    assert left_share(records_of([50.0] * 4_000)) < 0
    assert left_share(records_of([0.1 * number for number in range(4_000)])) > 0.05
    assert left_share(records_of([50.0 if number % 2 else 1.0 for number in range(4_000)])) < 0
    assert left_share(records_of([1.0] * 4)) == 0.0


@pytest.mark.parametrize("batching", ["saturation", "chunks"])
def test_a_request_alone_on_the_reference_is_slowed_down_by_nothing(batching: str) -> None:
    """A prompt that is a little longer than a chunk is computed whole, or its rest by itself."""
    reference = kind_of("mixed", tensor=2, chunk_tokens=2048, prefill_batching=batching)
    rows = (TraceRequest(None, 2_060, 40),)
    conditions = replace(CONDITIONS, shape=OPT_13B, rows=rows, reference=reference)
    probe = probe_of(reference, 1.0, 1)
    found = run_probe(probe, replace(conditions, settings={"instance": {"block_size": 16}})).slowdowns
    assert found == pytest.approx((1.0,) * 9, rel=0.005)
    assert slowdowns_of(Records(), replace(conditions, reference=None)) == ()


@pytest.mark.parametrize("count", [1, 7, 399, 400, 1_000])
def test_a_sample_is_spread_over_the_whole_trace(count: int) -> None:
    rows = tuple(TraceRequest(None, 1 + number, 1) for number in range(400))
    taken = [row.prompt_tokens - 1 for row in spaced(rows, count)]
    assert len(taken) == min(count, 400)
    assert taken[0] == 0
    gaps = {later - earlier for earlier, later in pairwise(taken)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
