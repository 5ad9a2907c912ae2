"""Attention workers beside a decode pool: what steps take, what is conserved, and what is refused."""

from typing import Any

import pytest

from common.errors import ConfigError
from scheduler.policy.staggering import Staggering, staggering_timing
from services.simulator.attention_cost import AttentionCost, PoolRows, Wire
from services.simulator.attention_engine import AttentionEngine
from services.simulator.attention_rates import Batch, Demand, demands_of, layer_rates
from services.simulator.cluster import Cluster
from services.simulator.conditions import Fares
from services.simulator.config import Simulated, load_simulated
from services.simulator.decode_room import DecodeRoom
from services.simulator.metrics import measure
from services.simulator.performance.linear import LinearPerformance
from services.simulator.step_times import StepTimes
from tests.services.simulator.meshes import PERFORMANCE, mesh, pool, run
from tests.test_house import REPOSITORY

LAYERS = 4
STEP = LinearPerformance(step_s=0.02, per_sequence_s=1e-4, per_context_token_s=1e-6)
TOKEN_Q, TOKEN_KV = 4 * 16 * 2, 2 * 2 * 16 * 2
"""Bytes of a token in a layer of the small model."""
NO_WIRE = Wire(TOKEN_Q, TOKEN_KV, 1e15, 1e15, 0.0)


def workers(count: int = 2, **keys: Any) -> dict[str, Any]:
    given = {"name": "attention", "role": "attention", "count": count, "kv_tokens": 100_000}
    return given | {"performance": PERFORMANCE} | keys


def remote(
    partition: str = "heads", pipeline: str = "off", batches: int = 2, *, count: int = 2, **keys: Any
) -> Simulated:
    """A prefill instance, and decode instances over two attention workers, or ``count``."""
    instance = {
        "attention_workers": count,
        "attention_partition": partition,
        "pipeline": pipeline,
        "staggered_batches": batches,
    }
    own = ("cluster", "scheduler", "attention", "fault")
    sections = {key: keys.pop(key) for key in own if key in keys}
    of_workers = {"count": count} | keys.pop("workers", {})
    prompts = pool("prefill", performance=keys.pop("prefill", PERFORMANCE))
    decode = {"kv_tokens": None, "instance": instance | keys.pop("instance", {})} | keys
    return mesh(prompts, pool("decode", **decode), workers(**of_workers), **sections)


def cost_of(*, wire: Wire = NO_WIRE, kv_share: float = 0.0, mini_batches: int = 1) -> AttentionCost:
    return AttentionCost(LAYERS, kv_share, STEP, STEP, wire, is_by_heads=True, mini_batches=mini_batches)


MODES = [("off", 2), ("rotational", 2), ("rotational", 3), ("fixed", 2), ("fixed", 3)]
REQUESTS = [(0.01 * number, 100 + number % 37, 50 + number % 91) for number in range(120)]


# costs


def test_a_batch_alone_takes_slice_attention_and_network_in_turn() -> None:
    wire = Wire(TOKEN_Q, TOKEN_KV, 1e6, 4e6, 1e-4)
    rows = (PoolRows(0, 10, 5_000),)
    layer = cost_of(wire=wire).layer(rows, {0: ("a", "b")})
    slice_s, attention_s = (0.02 + 10 * 1e-4) / LAYERS, 5_000 * 1e-6 / 2 / LAYERS
    q_s = 10 * TOKEN_Q / 1e6
    assert layer.slice_s == pytest.approx(slice_s)
    assert layer.offline_s == pytest.approx(slice_s + attention_s)
    # K and V come behind Q, and are there before attention over what is cached ends.
    assert attention_s < q_s
    kv_s = 10 * TOKEN_KV / 1e6
    there_s = max(q_s + attention_s, q_s + kv_s)
    assert layer.alone_s == pytest.approx(slice_s + 1e-4 + there_s + q_s + 1e-4)
    assert layer.sent_s == pytest.approx(2 * q_s + kv_s + 3e-4)


def test_q_leaves_before_k_and_v_are_computed() -> None:
    rows = (PoolRows(0, 10, 50_000),)
    slice_s, attention_s = (0.02 + 10 * 1e-4) / LAYERS, 50_000 * 1e-6 / 2 / LAYERS
    layer = cost_of(kv_share=0.25).layer(rows, {0: ("a", "b")})
    assert layer.offline_s == pytest.approx(0.75 * slice_s + attention_s)
    assert layer.offline_s < slice_s + attention_s


def test_a_mini_batch_is_on_its_way_while_another_is_computed() -> None:
    wire = Wire(TOKEN_Q, TOKEN_KV, 1e6, 1e6, 0.0)
    rows = (PoolRows(0, 10, 100_000),)
    attention_s, q_s = 100_000 * 1e-6 / LAYERS, 10 * TOKEN_Q / 1e6
    slice_s = (0.02 + 10 * 1e-4) / LAYERS
    assert attention_s / 4 > 2 * q_s
    whole, parts = (cost_of(wire=wire, mini_batches=m).layer(rows, {0: ("a",)}) for m in (1, 4))
    assert whole.alone_s == pytest.approx(slice_s + q_s + attention_s + q_s)
    # Of both ways a quarter is left: the first part's there, and the last one's back.
    assert parts.alone_s == pytest.approx(slice_s + q_s / 4 + attention_s + q_s / 4)


@pytest.mark.parametrize("context_tokens", [1_000, 40_000, 400_000])
@pytest.mark.parametrize(
    "turns", [Staggering(1), Staggering(2), Staggering(3), Staggering(2, is_fixed=True), Staggering(4, True)]
)
def test_equal_batches_get_on_as_the_papers_pipelines_do(turns: Staggering, context_tokens: int) -> None:
    layer = cost_of().layer((PoolRows(0, 10, context_tokens),), {0: ("a", "b")})
    rates = layer_rates(demands_of([Batch(layer, turns, "instance")] * turns.batches))
    timing = staggering_timing(turns, layer.slice_s, layer.shares[0].attention_s)
    assert [1 / rate for rate in rates] == pytest.approx([timing.cycle_s] * turns.batches)


def test_a_small_batch_goes_at_its_own_pace_beside_one_that_waits_for_itself() -> None:
    slow, fast = Demand(10.0, (("worker", 1.0),)), Demand(2.0, (("worker", 1.0),))
    assert layer_rates([slow, fast]) == pytest.approx([0.1, 0.5])
    crowded = layer_rates([slow, *[fast] * 4])
    assert crowded == pytest.approx([0.1, *[0.9 / 4] * 4])


def test_pools_that_share_some_of_their_workers_wait_for_those_alone() -> None:
    """Whether workers who fare alike are looked at together or each by itself."""
    cost, turns, rows = cost_of(), Staggering(1), (PoolRows(0, 10, 400_000),)
    pools: dict[str, tuple[str, ...]] = {"one": ("a", "b"), "two": ("b", "c"), "three": ("d", "e")}
    layers = {owner: cost.layer(rows, {0: members}) for owner, members in pools.items()}
    assert all(len(each.shares) == 1 for each in layers.values())
    rates = layer_rates(demands_of([Batch(layer, turns, owner) for owner, layer in layers.items()]))
    [attended] = layers["one"].shares
    assert rates == pytest.approx([0.5 / attended.attention_s] * 2 + [1 / layers["three"].alone_s])
    assert rates[0] < rates[2]


def test_a_worker_that_fares_otherwise_is_looked_at_by_itself() -> None:
    rows, workers = (PoolRows(0, 10, 400_000),), {0: ("a", "b", "c")}
    whole, other = (cost_of().layer(rows, workers, fares) for fares in ({}, {"b": Fares(3.0, 1.0)}))
    assert [each.workers for each in other.shares] == [("a", "c"), ("b",)]
    times = [each.attention_s / whole.shares[0].attention_s for each in other.shares]
    assert times == pytest.approx([1.0, 3.0])
    assert other.alone_s > whole.alone_s


def test_sums_of_steps_are_those_of_single_ones() -> None:
    def seconds_of(step: int) -> float:
        return max(5.0, 3.0 + 0.01 * step, 0.05 * step)

    times = StepTimes(seconds_of, 500)
    for steps in (0, 1, 2, 199, 200, 201, 333, 499, 500):
        assert times.until(steps) == pytest.approx(sum(map(seconds_of, range(steps))))
        assert times.done_by(times.until(steps) + 1e-9) == steps


# runs


def engine_of(cluster: Cluster) -> AttentionEngine:
    [engine] = [each.engine for each in cluster.instances.values() if each.pools is not None]
    assert isinstance(engine, AttentionEngine)
    return engine


def test_a_sequence_alone_takes_the_sum_of_its_steps() -> None:
    cluster = run(remote(), (0.0, 64, 200))
    [first_s], [end_s] = cluster.records.first_token_s, cluster.records.end_s
    kv_share = 2 * 64 * 2 * 16 * LAYERS / 1_000_000
    model_s = 0.02 + 1e-4
    steps_s = sum(max(model_s, model_s * (1 - kv_share) + (64 + step) * 1e-6 / 2) for step in range(1, 200))
    assert end_s - first_s == pytest.approx(steps_s, rel=1e-5)


@pytest.mark.parametrize("partition", ["heads", "requests"])
@pytest.mark.parametrize(("pipeline", "batches"), MODES)
def test_every_mode_serves_all_and_conserves_what_must_be(
    partition: str, pipeline: str, batches: int
) -> None:
    """``simulate`` holds every run to that."""
    cluster = run(remote(partition, pipeline, batches), *REQUESTS)
    metrics = measure(cluster)
    assert (metrics.done, metrics.continued) == (120, 0)
    assert metrics.attention is not None
    assert 0 < metrics.attention.busy <= metrics.attention.busiest <= 1
    each = {worker.name: worker.busy for worker in metrics.attention.by_worker}
    assert list(each) == ["attention-0", "attention-1"]
    assert sum(each.values()) / 2 == pytest.approx(metrics.attention.busy)
    assert max(each.values()) == metrics.attention.busiest
    assert 0 < metrics.attention.replicas_busy <= 1
    assert 0 <= metrics.attention.network_hidden <= 1
    assert 0 < metrics.attention.link_in <= 1
    assert engine_of(cluster).cost.is_by_heads == (partition == "heads")


@pytest.mark.parametrize(("pipeline", "batches"), MODES)
def test_a_run_is_the_same_every_time(pipeline: str, batches: int) -> None:
    one, other = (run(remote("requests", pipeline, batches), *REQUESTS).records for _ in range(2))
    assert one.digest() == other.digest()


@pytest.mark.parametrize("partition", ["heads", "requests"])
@pytest.mark.parametrize(("pipeline", "batches"), MODES)
def test_steps_in_one_event_take_what_single_steps_take(
    monkeypatch: pytest.MonkeyPatch, partition: str, pipeline: str, batches: int
) -> None:
    requests = [(0.4 * number, 100 + number % 37, 50 + number % 91) for number in range(30)]
    at_once = run(remote(partition, pipeline, batches), *requests)
    monkeypatch.setattr(DecodeRoom, "steps_ahead", lambda room, lane=0: 1)
    singly = run(remote(partition, pipeline, batches), *requests)
    passes = engine_of(at_once).passes, engine_of(singly).passes
    assert passes[0] < 0.6 * passes[1]
    # Of a pace that is set anew at every step others' contexts are known a little better.
    assert list(at_once.records.end_s) == pytest.approx(list(singly.records.end_s), rel=1e-3)


@pytest.mark.parametrize(("pipeline", "batches"), MODES)
def test_throughput_is_what_the_slower_stage_lets_through(pipeline: str, batches: int) -> None:
    """Of many equal sequences, in all lanes alike."""
    sequences, prompt, output = 12 * batches, 3_000, 400
    simulated = remote(
        "heads",
        pipeline,
        batches,
        prefill={"kind": "linear", "prefill_s": 1e-9},
        workers={"kv_tokens": 1_000_000, "performance": PERFORMANCE | {"per_context_token_s": 2e-6}},
        scheduler={"max_pending_prefill_tokens": 1_000_000, "max_requests_per_decode": 1_000},
    )
    cluster = run(simulated, *[(0.0, prompt, output)] * sequences)
    engine, records = engine_of(cluster), cluster.records
    lane_rows = sequences // (1 if pipeline == "off" else batches)
    slice_s = engine.cost.model.model_s(lane_rows) / LAYERS
    spent_s = 0.0
    for step in range(1, output):
        context_tokens = lane_rows * (prompt + step)
        attention_s = engine.cost.attention.attention_s(lane_rows, context_tokens) / 2 / LAYERS
        spent_s += LAYERS * staggering_timing(engine.turns, slice_s, attention_s).cycle_s
    # Lanes that begin one after another end so, too.
    assert max(records.end_s) == pytest.approx(spent_s, rel=0.02)


def test_two_instances_share_the_workers() -> None:
    """Each has as many batches as one alone, whose attention comes after the other's."""
    heavy: dict[str, Any] = {"kv_tokens": 200_000, "performance": PERFORMANCE | {"per_context_token_s": 1e-5}}
    instance = {"attention_workers": 2}
    one, two = (
        mesh(
            pool("prefill", performance={"kind": "linear", "prefill_s": 1e-9}),
            pool("decode", count, kv_tokens=None, instance=instance),
            workers(**heavy),
        )
        for count in (1, 2)
    )
    assert [each.attention.decode_instances for each in (one, two) if each.attention] == [1, 2]
    assert two.pools[1].total_blocks == one.pools[1].total_blocks // 2
    alone = run(one, (0.0, 8_000, 200))
    together = run(two, (0.0, 8_000, 200), (0.0, 8_000, 200))
    assert len({*together.records.decode}) == 2
    slice_s, attention_s = 0.0201, (8_000 + 100) * 1e-5 / 2
    assert max(alone.records.end_s) == pytest.approx(199 * (slice_s + attention_s), rel=0.02)
    assert max(together.records.end_s) == pytest.approx(199 * 2 * attention_s, rel=0.02)


def test_a_network_that_is_slow_is_hidden_by_other_batches() -> None:
    slow: dict[str, Any] = {"cluster": {"link_latency_s": 1e-3}}
    heavy = {"performance": PERFORMANCE | {"per_context_token_s": 4e-6}}
    alone, staggered = (
        measure(run(remote("heads", pipeline, 2, workers=heavy, **slow), *REQUESTS)).attention
        for pipeline in ("off", "rotational")
    )
    assert alone is not None
    assert staggered is not None
    assert staggered.network_hidden > alone.network_hidden + 0.3


# losses


# configurations


def test_laminas_machines_hold_about_the_batch_that_its_paper_states() -> None:
    """Disaggregation, 6.1: LLaMA3-70B's "attainable batch size reaches 800 for DOP = (2, 4)". Of which trace
    it does not say: with the mean context of Azure-Conv it is this."""
    lamina = load_simulated(REPOSITORY / "bench" / "lamina_dop24.toml")
    blocks, block_size = lamina.pools[1].total_blocks, lamina.pools[1].settings.instance.block_size
    assert blocks * block_size / (1154.7 + 211.1 / 2) == pytest.approx(800, rel=0.05)


@pytest.mark.parametrize(
    ("keys", "key", "rule"),
    [
        ({"count": 3}, "pool.decode.instance.attention_workers", "must divide the model's 2 KV heads"),
        ({"workers": {"count": 1}}, "pool.attention.count", "must be at least"),
        ({"kv_tokens": 1000}, "pool.decode.kv_tokens", "holds no KV"),
        (
            {"attention": {"decode_instances": 1}, "count_of": 2},
            "attention.decode_instances",
            "at least the 2",
        ),
        ({"attention": {"exchange_bytes": 1000}}, "attention", "attention.exchange_bytes = 1000"),
        ({"workers": {"kv_tokens": 1}}, "attention", "attention.kv_bytes"),
        ({"workers": {"devices": 0}}, "pool.attention.devices", "must be 1 to 10,000"),
        ({"workers": {"count": 10**7}}, "pool.attention.count", "must be 1 to 10,000"),
        ({"workers": {"kv_tokens": None}}, "pool.attention.device", "must be set where kv_tokens is not"),
        ({"workers": {"link_latency_s": -1.0}}, "pool.attention.link_latency_s", "0 or more"),
        ({"cluster": {"element_bytes": 1}}, "cluster.element_bytes", "must be 2 or 4"),
        ({"instance": {"attention_workers": 0}}, "pool.attention.role", "holds nobody's KV"),
    ],
)
def test_what_cannot_be_is_refused_by_name(keys: dict[str, Any], key: str, rule: str) -> None:
    of_decode = {"count": keys.pop("count_of")} if "count_of" in keys else {}
    given = {**keys, **({"of_decode": of_decode} if of_decode else {})}
    with pytest.raises(ConfigError, match=rule) as caught:
        build(given)
    assert caught.value.key == key


def build(keys: dict[str, Any]) -> Simulated:
    sections = {key: keys[key] for key in ("cluster", "attention") if key in keys}
    instance = {"attention_workers": keys.get("count", 2)} | keys.get("instance", {})
    decode = {"kv_tokens": keys.get("kv_tokens"), "instance": instance, **keys.get("of_decode", {})}
    of_workers = {"count": 3} | keys.get("workers", {})
    return mesh(pool("prefill"), pool("decode", **decode), workers(**of_workers), **sections)


def test_workers_that_nobody_has_are_missed() -> None:
    with pytest.raises(ConfigError, match="needs a \\[\\[pool\\]\\] of role 'attention'"):
        mesh(pool("prefill"), pool("decode", kv_tokens=None, instance={"attention_workers": 2}))


@pytest.mark.parametrize(
    ("performance", "key", "rule"),
    [
        ({"kind": "linear", "step_s": -1.0}, "step_s", "must be 0 or more"),
        ({}, "kind", "must be given, one of linear, roofline, "),
    ],
)
def test_attention_workers_performance_is_named_by_its_table(
    performance: dict[str, Any], key: str, rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        remote(workers={"performance": performance})
    assert caught.value.key == f"pool.attention.performance.{key}"


def test_a_source_that_measured_whole_steps_is_refused() -> None:
    measured = {"kind": "splitwise", "path": "perf_model.csv", "model": "bloom-176b", "hardware": "h100"}
    with pytest.raises(ConfigError, match="must be roofline, linear") as caught:
        remote(workers={"performance": measured})
    assert (caught.value.key, caught.value.value) == ("pool.attention.performance.kind", "splitwise")
