"""Instances whose layers lie on several stages, against what is known of pipelines."""

import math
import random
from typing import Any, get_args

import msgspec
import pytest

from common.config import MixedPolicy
from common.errors import ConfigError
from common.messages import LoadReport
from services.bench.arrivals import poisson_arrivals
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.decode_room import DecodeRoom
from services.simulator.instance import SimulatedInstance
from services.simulator.metrics import measure
from services.simulator.pipelined import PipelinedEngine
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import SHAPE, TOKEN_BYTES, assert_same_times, mesh, pool, run

PASS_S = 0.01 + 100e-4
"""Of a prompt of 100 tokens."""
DEEP = {"max_waiting_requests": 100_000}
PATIENT = {"max_pending_prefill_tokens": 10_000_000, "max_requests_per_decode": 100_000}


def prefill_of(stages: int, speedup: float = 1.0) -> Simulated:
    """A prefill instance that computes prompts of 100 tokens one by one."""
    performance = {
        "kind": "linear",
        "prefill_s": 0.01 / speedup,
        "per_prompt_token_s": 1e-4 / speedup,
        "step_s": 0.02,
    }
    return mesh(
        pool("prefill", pipeline=stages, performance=performance, kv_tokens=10_000_000),
        pool("decode"),
        instance={"chunk_tokens": 100, **DEEP},
        scheduler=PATIENT,
    )


def ttfts(cluster: Cluster) -> list[float]:
    records = cluster.records
    return [first - came for came, first in zip(records.arrival_s, records.first_token_s, strict=True)]


@pytest.mark.parametrize("stages", [2, 4])
def test_prompts_at_a_stage_s_pace_never_wait(stages: int) -> None:
    """D/D/1, where the slowest stage serves: each takes the whole pipeline's time, and no more."""
    pace_s = PASS_S / stages
    requests = [Offered(number * pace_s, 100, 1) for number in range(50)]
    assert ttfts(simulate(prefill_of(stages), Load(requests))) == pytest.approx([PASS_S] * 50)


@pytest.mark.parametrize("stages", [2, 4])
def test_prompts_that_come_faster_wait_for_the_first_stage(stages: int) -> None:
    stage_s = PASS_S / stages
    requests = [Offered(number * 0.8 * stage_s, 100, 1) for number in range(50)]
    waits = [0.2 * stage_s * number for number in range(50)]
    found = ttfts(simulate(prefill_of(stages), Load(requests)))
    assert found == pytest.approx([PASS_S + wait for wait in waits])


REQUESTS = 4000


def mean_ttft_s(simulated: Simulated, rate_per_s: float) -> float:
    arrivals = poisson_arrivals(rate_per_s, seed=7)
    load = Load([Offered(next(arrivals), 100, 1) for _ in range(REQUESTS)])
    ttft = measure(simulate(simulated, load)).ttft
    assert ttft is not None
    return ttft.mean_s


@pytest.mark.parametrize("load", [0.4, 1.0, 1.6])
def test_inter_operator_parallelism_waits_as_distserve_says(load: float) -> None:
    """3.3, eq. 2: D + R D² / (4 (2 − R D)), the queue of a stage of D / 2. ``load``: R D."""
    queue_s = load * PASS_S / (4 * (2 - load))
    waited_s = mean_ttft_s(prefill_of(2), load / PASS_S) - PASS_S
    assert waited_s == pytest.approx(queue_s, rel=0.1)


@pytest.mark.parametrize("load", [0.4, 1.2])
def test_intra_operator_parallelism_waits_as_distserve_says(load: float) -> None:
    """3.3, eq. 3: D / K + R D² / (2 K (K − R D)), with a speedup K of 1.6 on two devices."""
    speedup = 1.6
    queue_s = load * PASS_S / (2 * speedup * (speedup - load))
    waited_s = mean_ttft_s(prefill_of(1, speedup), load / PASS_S) - PASS_S / speedup
    assert waited_s == pytest.approx(queue_s, rel=0.1)


def test_a_short_prompt_waits_before_a_stage_that_a_long_one_is_in() -> None:
    """DistServe's bubbles (3.3): stages of 60, then of 15 ms."""
    [long_s, short_s, last_s] = ttfts(
        run(prefill_of_chunks(2, 1100), (0.0, 1100, 1), (0.001, 200, 1), (0.002, 1100, 1))
    )
    whole_s, brief_s = 0.01 + 0.11, 0.01 + 0.02
    assert long_s == pytest.approx(whole_s)
    # Its first stage is over long before the long one's second.
    assert short_s == pytest.approx(whole_s + brief_s / 2 - 0.001)
    # Two passes are under way: it begins when one of them has ended.
    assert last_s == pytest.approx(2 * whole_s - 0.002)


def prefill_of_chunks(stages: int, chunk_tokens: int) -> Simulated:
    return mesh(
        pool("prefill", pipeline=stages),
        pool("decode"),
        instance={"chunk_tokens": chunk_tokens, "prefill_batching": "saturation"},
        scheduler=PATIENT,
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_prompt_that_ends_costs_it_costs_once_however_many_chunks_it_has(stages: int) -> None:
    def first_token_s(ended_s: float) -> float:
        performance = {"kind": "linear", "prefill_s": 0.01, "per_ended_prompt_s": ended_s}
        simulated = mesh(
            pool("prefill", pipeline=stages, performance=performance),
            pool("decode"),
            instance={"chunk_tokens": 100},
        )
        [ttft_s] = ttfts(run(simulated, (0.0, 250, 1)))
        return ttft_s

    assert first_token_s(0.5) - first_token_s(0.0) == pytest.approx(0.5)


def decode_of(stages: int, **keys: Any) -> Simulated:
    step = {"kind": "linear", "step_s": 0.04}
    return mesh(
        pool("prefill", performance={"kind": "linear"}),
        pool("decode", pipeline=stages, performance=step, kv_tokens=100_000),
        **keys,
    )


def test_decodes_gain_rate_and_no_speed() -> None:
    """Batches take turns, one in each stage: everybody's step takes as long as without stages."""
    requests = [(0.0, 16, 101)] * 8
    for stages in (1, 2, 4):
        cluster = run(decode_of(stages), *requests)
        metrics = measure(cluster)
        assert metrics.tpot is not None
        assert metrics.tpot.mean_s == pytest.approx(0.04, rel=0.02)
        [decode] = (each for each in metrics.pools if each.role == "decode")
        assert decode.batch == pytest.approx(8 / stages, rel=0.02)
        # A stage's passes are its share of the whole: none of them is ever idle for long.
        assert decode.busy == pytest.approx(1.0, abs=0.03)


def test_a_lone_batch_leaves_all_stages_but_one_idle() -> None:
    [decode] = (each for each in measure(run(decode_of(4), (0.0, 16, 101))).pools if each.role == "decode")
    assert decode.busy == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("policy", get_args(MixedPolicy))
def test_whatever_waits_in_stages_ends_once(stages: int, policy: MixedPolicy) -> None:
    """With little memory, long prompts in chunks, and KV that leaves layer by layer."""
    requests = [(0.003 * number, 20 + 37 * number % 300, 1 + 13 * number % 50) for number in range(60)]
    simulated = mesh(
        pool("mixed", pipeline=stages, kv_tokens=3_000),
        pool("prefill", pipeline=stages, kv_tokens=3_000),
        pool("decode", pipeline=stages, kv_tokens=3_000),
        instance={"chunk_tokens": 64, "mixed_policy": policy},
        cluster={"link_bytes_per_s": 1e6},
        transfer={"layerwise_min_tokens": 32},
    )
    cluster = run(simulated, *requests)
    metrics = measure(cluster)
    assert metrics.done == metrics.requests == 60
    assert measure(run(simulated, *requests)).digest == metrics.digest
    if stages > 1:
        assert metrics.pools[-1].decode_steps > 0


def test_layers_leave_as_their_stage_has_computed_them() -> None:
    """Four layers in two stages: KV crosses a slow link beside the prompt's own pass. Layers of 3.3 MB are
    told of one by one."""
    shape = SHAPE | {"head_dim": 4096}
    tokens, token_bytes = 100, 256 * TOKEN_BYTES

    def second_token_s(layerwise_min_tokens: int) -> float:
        cluster = run(
            mesh(
                pool("prefill", pipeline=2),
                pool("decode"),
                cluster={"shape": shape, "link_bytes_per_s": tokens * token_bytes / PASS_S},
                transfer={"layerwise_min_tokens": layerwise_min_tokens, "pull_share": 1.0},
            ),
            (0.0, tokens, 5),
        )
        return cluster.records.second_token_s[0] - cluster.records.first_token_s[0]

    # As long as the whole prompt takes, or one layer's part of it after the last one is computed.
    assert second_token_s(10_000) == pytest.approx(PASS_S + 0.02 + 1e-4 + 101e-6, rel=0.01)
    assert second_token_s(1) == pytest.approx(PASS_S / 4 + 0.02 + 1e-4 + 101e-6, rel=0.1)


def test_a_stage_s_memory_holds_its_part_of_the_layers() -> None:
    """Ten layers in four stages are 3, 3, 2 and 2; the first one looks tokens up, the last has the output."""
    shape = SHAPE | {"layers": 10, "parameters": 1_000_000_000, "lookup_parameters": 64_000}
    keys: dict[str, Any] = {
        "device": "rtx-3090",
        "devices": 1,
        "kv_tokens": None,
        "performance": {"kind": "linear"},
    }
    cluster = {"shape": shape, "memory_share": 0.5}

    def kv_tokens(stages: int) -> int:
        [mixed] = mesh(pool("mixed", pipeline=stages, **keys), cluster=cluster).pools
        return mixed.total_blocks * 16

    memory, token = 0.5 * 24e9, TOKEN_BYTES * 10 / 4
    assert kv_tokens(1) == pytest.approx((memory - 2e9) / token, rel=1e-4)
    blocks_bytes = 2 * (1_000_000_000 - 64_000 - 64_000)
    first_bytes = 0.3 * blocks_bytes + 2 * 64_000
    assert kv_tokens(4) == pytest.approx((memory - first_bytes) / (0.3 * token), rel=1e-4)


def test_devices_of_all_stages_are_paid_for() -> None:
    keys: dict[str, Any] = {"device": "a100", "devices": 2}
    metrics = measure(run(mesh(pool("mixed", pipeline=2, **keys)), (0.0, 16, 20)))
    [mixed] = metrics.hardware.pools
    assert mixed.devices == 4
    assert mixed.usd_h is not None
    assert math.isclose(mixed.usd_h, 4 * 5.30)


@pytest.mark.parametrize(("stages", "rule"), [(0, "must be 1 to"), (5, "at most the 4 layers")])
def test_stages_without_layers_are_refused(stages: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as told:
        mesh(pool("mixed", pipeline=stages))
    assert told.value.key == "pool.mixed.pipeline"


def test_a_stage_that_its_weights_do_not_fit_is_refused() -> None:
    shape = SHAPE | {"layers": 2, "parameters": 30_000_000_000}
    keys: dict[str, Any] = {"device": "rtx-3090", "kv_tokens": None}
    with pytest.raises(ConfigError, match="of one of 2 stages"):
        mesh(pool("mixed", pipeline=2, **keys), cluster={"shape": shape})


REQUESTS_OF: dict[str, tuple[tuple[float, int, int], ...]] = {
    "at once": ((0.0, 16, 400),) * 7,
    "one after another": tuple((0.9 * number, 16 + number, 300 - 9 * number) for number in range(20)),
    "often": tuple((0.05 * number, 20 + 37 * number % 300, 40 + 13 * number % 250) for number in range(60)),
}


@pytest.mark.parametrize("requests", REQUESTS_OF)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_steps_in_one_plan_take_what_single_steps_take(
    monkeypatch: pytest.MonkeyPatch, stages: int, requests: str, is_mixed: bool
) -> None:
    """Batches of different sizes wait for one another before stages."""
    pools = [pool("prefill"), pool("decode", pipeline=stages)]
    if is_mixed:
        pools = [pool("mixed", pipeline=stages, kv_tokens=4_000)]
    planned = run(mesh(*pools), *REQUESTS_OF[requests])
    monkeypatch.setattr(DecodeRoom, "steps_ahead", lambda room, lane=0: 1)
    singly = run(mesh(*pools), *REQUESTS_OF[requests])
    assert_same_times(planned, singly)
    ours, theirs = measure(planned), measure(singly)
    for one, other in zip(ours.pools, theirs.pools, strict=True):
        assert one.decode_steps == other.decode_steps
        assert (one.batch, one.busy) == pytest.approx((other.batch, other.busy))
    assert ours.events < (0.2 if requests == "at once" else 1.0) * theirs.events


RAGGED = {
    "kind": "linear",
    "prefill_s": 0.0097,
    "per_prompt_token_s": 1.03e-4,
    "step_s": 0.0213,
    "per_sequence_s": 1.07e-4,
    "per_context_token_s": 1.01e-6,
}
"""No two things end at once."""
MESHES: dict[str, Simulated] = {
    "mixed": mesh(pool("mixed", pipeline=2, performance=RAGGED)),
    "mixed, short of memory": mesh(pool("mixed", pipeline=2, kv_tokens=3_000, performance=RAGGED)),
    "decode": mesh(
        pool("prefill", performance=RAGGED),
        pool("decode", 2, pipeline=2, kv_tokens=6_000, performance=RAGGED),
        cluster={"link_bytes_per_s": 1e6},
    ),
    "of predicted lengths": mesh(
        pool("prefill", performance=RAGGED),
        pool("mixed", pipeline=3, performance=RAGGED),
        prediction={"accuracy": 0.4, "granularity": 30},
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_reports_amid_a_plan_say_what_they_would_if_they_cut_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """To the last bit, and so are the records, though the rooms are told of the steps later."""
    chance = random.Random(7)
    requests = [(number * 0.21, chance.randint(5, 300), chance.randint(2, 400)) for number in range(60)]
    reports: list[LoadReport] = []
    load, untold_steps = SimulatedInstance.load, PipelinedEngine.untold_steps
    untold: list[tuple[int, ...]] = []

    def noted_load(instance: SimulatedInstance) -> LoadReport:
        reports.append(load(instance))
        return reports[-1]

    def noted_steps(engine: PipelinedEngine) -> tuple[int, ...]:
        untold.append(untold_steps(engine))
        return untold[-1]

    def cut(engine: PipelinedEngine) -> tuple[int, ...]:
        engine.catch_up()
        engine.look_ahead()
        return ()

    monkeypatch.setattr(SimulatedInstance, "load", noted_load)
    monkeypatch.setattr(PipelinedEngine, "untold_steps", noted_steps)
    going_on, found = run(MESHES[name], *requests), list(reports)
    assert sum(map(any, untold)) > 30
    reports.clear()
    monkeypatch.setattr(PipelinedEngine, "untold_steps", cut)
    cluster = run(MESHES[name], *requests)
    for one, other in zip(found, reports, strict=True):
        assert one == other
    budgets = ([each.decode_state.pulls.budget for each in lived.lives] for lived in (going_on, cluster))
    assert next(budgets) == next(budgets)
    ours, theirs = measure(going_on), measure(cluster)
    assert msgspec.structs.replace(ours, events=0) == msgspec.structs.replace(theirs, events=0)


def test_a_plan_that_nothing_cuts_takes_few_events() -> None:
    requests = [(0.0, 16, 2_001)] * 8
    metrics = measure(run(decode_of(4), *requests))
    assert metrics.pools[-1].decode_steps >= 4 * 2_000
    # Most of them are load reports.
    assert metrics.events < 2_500
