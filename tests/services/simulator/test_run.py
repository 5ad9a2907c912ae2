"""Simulated meshes: what a request sees, and that nothing is lost, in every arrangement."""

import gc
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from common.config import MixedPolicy
from common.errors import ConfigError, Overloaded
from common.kv.blocks import BlockOwner
from services.simulator import run as run_module
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.decode_room import DecodeRoom
from services.simulator.metrics import measure
from services.simulator.records import request_id_of
from services.simulator.run import Load, Offered, SimulationError, check_conserved, simulate
from services.simulator.tables import summary_of
from tests.services.simulator.meshes import (
    PERFORMANCE,
    SHAPE,
    TOKEN_BYTES,
    assert_same_times,
    mesh,
    offered,
    pool,
    run,
)

LAYERWISE_NEVER = {"layerwise_min_tokens": 1_000_000}


REQUESTS = 40


def chances(
    requests: int, rate_per_s: float, seed: int, most_prompt: int = 800, most_output: int = 200
) -> Iterator[Offered]:
    chance = random.Random(seed)
    now = 0.0
    for _ in range(requests):
        now += chance.expovariate(rate_per_s)
        yield Offered(now, chance.randint(1, most_prompt), chance.randint(1, most_output))


def test_a_request_alone_takes_what_its_passes_and_its_kv_take() -> None:
    """300 tokens in chunks of 128; KV over a slow link; then steps of growing context."""
    bytes_per_s = 1e6
    cluster = run(
        mesh(
            pool("prefill"),
            pool("decode"),
            cluster={"link_bytes_per_s": bytes_per_s},
            instance={"chunk_tokens": 128},
            transfer=LAYERWISE_NEVER,
        ),
        (1.0, 300, 5),
    )
    records = cluster.records
    first_s = 1.0 + 3 * 0.01 + 300 * 1e-4
    assert records.first_token_s[0] == pytest.approx(first_s)
    steps = [0.02 + 1e-4 + 1e-6 * (301 + step) for step in range(4)]
    sent_s = 300 * TOKEN_BYTES / bytes_per_s
    assert records.second_token_s[0] == pytest.approx(first_s + sent_s + steps[0])
    assert records.end_s[0] == pytest.approx(first_s + sent_s + sum(steps))
    assert records.slowest_gap_s[0] == pytest.approx(sent_s + steps[0])
    metrics = measure(cluster)
    assert metrics.pools[0].sent_bytes == 300 * TOKEN_BYTES
    link = sent_s / metrics.elapsed_s
    assert [(each.link_out, each.link_in) for each in metrics.pools] == [
        pytest.approx((link, 0)),
        pytest.approx((0, link)),
    ]
    assert [each.decode_steps for each in metrics.pools] == [0, 4]


def test_prompts_of_two_prefill_instances_share_the_link_of_one_decode_instance() -> None:
    given: dict[str, Any] = {
        "cluster": {"link_bytes_per_s": 1e6},
        "instance": {"chunk_tokens": 512},
        "transfer": LAYERWISE_NEVER,
    }
    alone = run(mesh(pool("prefill", 2), pool("decode"), **given), (0.0, 400, 3))
    both = run(mesh(pool("prefill", 2), pool("decode"), **given), (0.0, 400, 3), (0.0, 400, 3))
    sent_s = 400 * TOKEN_BYTES / 1e6
    waited_s = [end_s - first_s for end_s, first_s in _seconds(both)]
    assert waited_s[0] - _seconds(alone)[0][0] + _seconds(alone)[0][1] == pytest.approx(sent_s, rel=0.01)
    assert len({*both.records.prefill}) == 2


def _seconds(cluster: Cluster) -> list[tuple[float, float]]:
    return list(zip(cluster.records.second_token_s, cluster.records.first_token_s, strict=True))


def test_layer_by_layer_most_of_the_transfer_is_over_with_the_prompt() -> None:
    """A transfer as long as the computation, of eight chunks, hides but for the last layer's."""
    given = {"cluster": {"link_bytes_per_s": 1e7}, "instance": {"chunk_tokens": 512}}
    later, beside = (
        run(mesh(pool("prefill"), pool("decode"), transfer=transfer, **given), (0.0, 4096, 3))
        for transfer in (LAYERWISE_NEVER, {"layerwise_min_tokens": 1})
    )
    sent_s = 4096 * TOKEN_BYTES / 1e7
    [(later_s, later_first_s)], [(beside_s, beside_first_s)] = _seconds(later), _seconds(beside)
    assert later_first_s == pytest.approx(beside_first_s)
    assert later_s - later_first_s > sent_s
    assert beside_s - beside_first_s < 0.15 * sent_s + 0.03


def test_prompts_under_the_threshold_hand_over_in_one_piece_and_longer_ones_by_layers() -> None:
    """What is left to send when the prompt is computed. Layers of so small a model go by the chunk: they are
    told of in pieces of two MiB."""
    bytes_per_s = 4e6
    given: dict[str, Any] = {"cluster": {"link_bytes_per_s": bytes_per_s}, "instance": {"chunk_tokens": 128}}
    pools = (pool("prefill"), pool("decode"))
    prompts = (256, 2048)
    waits_s = {}
    for least in (1, 512, 1_000_000):
        simulated = mesh(*pools, transfer={"layerwise_min_tokens": least}, **given)
        for tokens in prompts:
            [(second_s, first_s)] = _seconds(run(simulated, (0.0, tokens, 3)))
            waits_s[least, tokens] = second_s - first_s
    whole_s = {tokens: tokens * TOKEN_BYTES / bytes_per_s for tokens in prompts}
    assert all(waits_s[1_000_000, tokens] > whole_s[tokens] for tokens in prompts)
    assert waits_s[512, 256] == waits_s[1_000_000, 256] > waits_s[1, 256]
    assert waits_s[512, 2048] == waits_s[1, 2048] < 0.7 * waits_s[1_000_000, 2048]


def test_a_larger_share_of_a_step_for_pulls_lets_new_sequences_start_sooner() -> None:
    """A portion is what crosses the link in the share: of a prompt beside a sequence that runs."""
    second_s = []
    for share in (0.05, 1.0):
        simulated = mesh(
            pool("prefill"),
            pool("decode"),
            cluster={"link_bytes_per_s": 3e7},
            transfer=LAYERWISE_NEVER | {"pull_share": share},
        )
        records = run(simulated, (0.0, 100, 400), (1.0, 4000, 3)).records
        second_s.append(records.second_token_s[1])
    assert second_s[1] < second_s[0]


def test_sequences_do_not_queue_for_their_kv_where_the_link_has_time_for_them() -> None:
    """Two fifths of a link's time are wanted: within a fifth of every step nobody would catch up. By default
    all of it is for those that wait, and where it is a fifth they have more as they come to be more."""
    shape = SHAPE | {"layers": 64, "heads": 8, "kv_heads": 8, "head_dim": 128}
    tokens, bytes_per_s, rate_per_s = 500, 5e9, 15
    assert tokens * 64 * 2 * 8 * 128 * 2 * rate_per_s == pytest.approx(0.393 * bytes_per_s, rel=1e-3)
    cluster = {"shape": shape, "link_bytes_per_s": bytes_per_s}
    pools = (pool("prefill", 3), pool("decode", kv_tokens=1_000_000))
    waits_s = {}
    for given in ({}, {"pull_share": 0.2}):
        simulated = mesh(*pools, cluster=cluster, transfer=LAYERWISE_NEVER | given)
        load = [(number / rate_per_s, tokens, 40) for number in range(300)]
        seconds = _seconds(run(simulated, *load))
        waits_s[bool(given)] = max(second_s - first_s for second_s, first_s in seconds[200:])
    assert waits_s[False] < 0.15
    assert waits_s[True] < 1.5


def test_a_host_tier_is_as_large_as_a_live_one() -> None:
    for swap_tokens in (160, 1_000_000):
        instance = {"swap_bytes": swap_tokens * TOKEN_BYTES}
        cluster = run(mesh(pool("mixed", kv_tokens=3200), instance=instance), (0.0, 100, 10))
        [state] = [each.decode_state for each in cluster.lives]
        assert state.swapping.host.total_blocks == min(swap_tokens, 3200) // 16


ARRANGEMENTS: dict[str, Simulated] = {
    "pools": mesh(pool("prefill", 2), pool("decode", 2), instance={"chunk_tokens": 256}),
    "with messages that take time": mesh(pool("prefill", 2), pool("decode", 2), cluster={"hop_s": 0.003}),
    "without room": mesh(
        pool("prefill", 2, kv_tokens=3000),
        pool("decode", 2, kv_tokens=3000, instance={"swap_bytes": 0}),
        cluster={"link_bytes_per_s": 1e7},
    ),
    "without room, with a host tier": mesh(
        pool("prefill", 2, kv_tokens=3000),
        pool("decode", 2, kv_tokens=3000),
        cluster={"link_bytes_per_s": 1e7, "host_bytes_per_s": 1e6},
    ),
    "reserving": mesh(
        pool("prefill", 1),
        pool("decode", 2, kv_tokens=4000, instance={"decode_admission": "reserve_dynamic"}),
    ),
    "layer by layer": mesh(
        pool("prefill", 2),
        pool("decode", 2),
        cluster={"link_bytes_per_s": 1e7},
        transfer={"layerwise_min_tokens": 1},
    ),
    "bound late": mesh(pool("prefill", 2), pool("decode", 3), scheduler={"decode_binding": "late"}),
    "deferred": mesh(pool("prefill", 3), pool("decode", 2), scheduler={"prefill_policy": "deferred"}),
    "mixed, chunked": mesh(pool("mixed", 3, kv_tokens=4000)),
    "mixed, prompts first": mesh(
        pool("mixed", 3, kv_tokens=4000), instance={"mixed_policy": "prefill_first"}
    ),
    "mixed, prompts first and decodes that fit": mesh(
        pool("mixed", 3, kv_tokens=4000),
        instance={"mixed_policy": "splitwise", "prefill_batching": "saturation"},
        scheduler={"prefill_policy": "token_jsq"},
    ),
    "mixed, whole prompts beside decodes": mesh(
        pool("mixed", 3, kv_tokens=4000), instance={"mixed_policy": "orca", "max_decode_batch": 8}
    ),
    "mixed, static batches": mesh(pool("mixed", 3, kv_tokens=8000), instance={"mixed_policy": "static"}),
    "mixed, static batches beside pools": mesh(
        pool("mixed", 2, kv_tokens=4000),
        pool("prefill"),
        instance={"mixed_policy": "static", "max_decode_batch": 8},
        scheduler={"prefill_policy": "round_robin"},
    ),
    "mixed, by the most that will be needed": mesh(
        pool("mixed", 3, kv_tokens=4000),
        instance={"mixed_policy": "prefill_first", "decode_admission": "reserve_peak"},
    ),
    "all three": mesh(pool("prefill"), pool("decode"), pool("mixed", 2)),
    "roles that flip": mesh(
        pool("prefill", 2),
        pool("decode", 2),
        roles={"policy": "overflow", "overflow_queue_s": 0.05, "cool_down_s": 0.2, "settle_s": 0.5},
    ),
    "short ones first": mesh(pool("prefill"), pool("decode"), instance={"prefill_order": "srpt"}),
    "with an oracle": mesh(
        pool("prefill"),
        pool("decode", 3, kv_tokens=4000),
        predictor={"kind": "oracle", "lengths_file": "lengths"},
        scheduler={"decode_policy": "power_of_two"},
    ),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_request_ends_once_and_nothing_is_kept(name: str) -> None:
    """``simulate`` holds the run to it; here that all are served, and twice alike. Outputs end by themselves,
    or in every second arrangement by what is allowed."""
    max_tokens = 300 if list(ARRANGEMENTS).index(name) % 2 else None
    load = Load(list(chances(REQUESTS, 25.0, seed=3)), max_tokens)
    first, again = simulate(ARRANGEMENTS[name], load), simulate(ARRANGEMENTS[name], load)
    metrics = measure(first)
    assert (metrics.done, metrics.requests) == (REQUESTS, REQUESTS)
    assert list(first.records.drawn_tokens) == list(first.records.output_tokens)
    assert metrics.digest == again.records.digest()
    other = simulate(ARRANGEMENTS[name], Load(list(chances(REQUESTS, 25.0, seed=4)), max_tokens))
    assert metrics.digest != other.records.digest()


def test_memory_that_runs_out_preempts_and_is_swapped_where_there_is_a_tier() -> None:
    load = Load(list(chances(150, 25.0, seed=3)))
    without = measure(simulate(ARRANGEMENTS["without room"], load))
    with_tier = measure(simulate(ARRANGEMENTS["without room, with a host tier"], load))
    assert without.pools[1].preempted > 0
    assert without.continued >= without.pools[1].preempted
    assert with_tier.pools[1].swaps > 0


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_steps_in_one_event_take_what_single_steps_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times differ by rounding alone, except where decisions hang on what is measured of them."""
    load = Load(list(chances(25, 25.0, seed=5)))
    skipped = simulate(ARRANGEMENTS[name], load)
    monkeypatch.setattr(DecodeRoom, "steps_ahead", lambda room, lane=0: 1)
    singly = simulate(ARRANGEMENTS[name], load)
    assert skipped.clock.events < singly.clock.events
    assert_same_times(skipped, singly)


CHUNK_S = 0.02 + 64e-4 + 1e-4 + 1e-3
WHOLE_S = 6400e-4


@pytest.mark.parametrize(
    ("policy", "slowest_s", "waited_s"),
    [
        # In chunks that take the decodes along, which none stops.
        ("chunked", (0.02, 1.2 * CHUNK_S), (100 * 0.02, 100 * 1.2 * CHUNK_S)),
        # A hundred chunks, between which decodes wait for a second at most.
        ("prefill_first", (0.9, 1.2), (100 * 0.0164, 100 * 0.02)),
        # Every fifth of them has the decode's token, for which there is no room beside a chunk.
        ("splitwise", (5 * 0.0164, 4 * 0.0164 + 1.2 * CHUNK_S), (100 * 0.0164, 100 * 0.02)),
        # One pass with the decode's token.
        ("orca", (WHOLE_S + 0.02, WHOLE_S + 0.03), (WHOLE_S + 0.02, WHOLE_S + 0.05)),
        # Not before all 200 tokens are there.
        ("static", (0.02, 0.021), (3.0 + WHOLE_S, 3.3 + WHOLE_S)),
    ],
)
def test_a_mixed_instance_computes_prompts_beside_decodes_as_its_policy_says(
    policy: MixedPolicy, slowest_s: tuple[float, float], waited_s: tuple[float, float]
) -> None:
    """A long prompt comes while an output of 200 tokens is drawn, which takes four seconds."""
    simulated = mesh(pool("mixed"), instance={"mixed_policy": policy, "chunk_tokens": 64})
    records = run(simulated, (0.0, 10, 200), (1.0, 6400, 2)).records
    assert slowest_s[0] < records.slowest_gap_s[0] < slowest_s[1]
    assert waited_s[0] < records.first_token_s[1] - 1.0 < waited_s[1]


def test_reports_keep_their_gap_and_nothing_hangs_on_those_of_a_lone_instance() -> None:
    load = Load(list(chances(REQUESTS, 4.0, seed=1)))
    often, seldom = (
        simulate(mesh(pool("mixed"), instance={"report_gap_s": gap_s, "report_interval_s": gap_s}), load)
        for gap_s in (0.02, 1.0)
    )
    assert_same_times(often, seldom)
    for cluster, gap_s in ((often, 0.02), (seldom, 1.0)):
        (instance,) = cluster.lives
        assert 1 < instance.reports <= 1 + cluster.clock.now / gap_s
    assert 5 * seldom.lives[0].reports < often.lives[0].reports


def test_who_is_refused_is_rejected_and_comes_again_if_its_client_asks() -> None:
    simulated = mesh(pool("prefill"), pool("decode"), scheduler={"max_pending_prefill_tokens": 100})
    crowd = [(0.001 * number, 100, 2) for number in range(50)]
    impatient = measure(run(simulated, *crowd))
    assert impatient.rejected > 0
    assert impatient.rejected + impatient.done == 50
    [refusal] = impatient.refusals
    assert (refusal.code, refusal.requests) == (Overloaded.code, impatient.rejected)
    assert any(refusal.message in line for line in summary_of(impatient))
    patient = measure(run(simulated, *crowd, retries=100))
    assert (patient.done, patient.refusals) == (50, ())


def test_what_nobody_can_hold_is_rejected() -> None:
    cluster = run(mesh(pool("prefill"), pool("decode", kv_tokens=160)), (0.0, 100, 100), (0.0, 50, 50))
    metrics = measure(cluster)
    assert (metrics.done, metrics.rejected) == (1, 1)
    [refusal] = metrics.refusals
    assert "200" in refusal.message, "the tokens that it would have come to"


def test_hours_without_requests_are_told_as_they_pass_and_change_nothing() -> None:
    simulated = mesh(pool("prefill"), pool("decode"))
    requests = ((0.0, 200, 3), (4 * 3600.0, 200, 3))
    told: list[tuple[int, float]] = []
    cluster = simulate(simulated, Load(offered(*requests)), lambda come, now_s: told.append((come, now_s)))
    assert told[:4] == [(1, 3600.0), (1, 7200.0), (1, 10_800.0), (2, 14_400.0)]
    alone = run(simulated, (0.0, 200, 3))
    assert cluster.records.end_s[0] == alone.records.end_s[0]
    assert cluster.records.end_s[1] - 4 * 3600.0 == pytest.approx(alone.records.end_s[0], abs=1e-6)


PATIENT = {"deadline_s": 1e7, "suspect_after_s": 1e6}
LATE = "2 of 2 requests had not ended, and none had for 600 s"


@pytest.mark.parametrize(
    ("cluster", "key", "rule"),
    [
        ({"hop_s": 1e6}, "cluster.hop_s", f"must be under 60 s: {LATE}"),
        ({"link_latency_s": 1e6}, "cluster.link_latency_s", f"must be under 600 s: {LATE}"),
        ({"link_bytes_per_s": 10.0}, "cluster.link_bytes_per_s", "takes 10,240 s for the 102,400 bytes of"),
    ],
)
def test_a_setting_under_which_nothing_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, float], key: str, rule: str
) -> None:
    monkeypatch.setattr(run_module, "STUCK_S", 600.0)
    slow = mesh(pool("prefill"), pool("decode"), cluster=cluster, transfer=PATIENT | LAYERWISE_NEVER)
    with pytest.raises(ConfigError) as told:
        run(slow, (0.0, 200, 3), (0.0, 200, 3))
    assert (told.value.key, told.value.value) == (key, cluster[key.removeprefix("cluster.")])
    assert told.value.rule.startswith(rule)


def test_messages_that_take_longer_than_a_mesh_may_to_come_to_rest_are_told() -> None:
    slow = mesh(pool("prefill"), pool("decode"), cluster={"hop_s": 1_000.0})
    with pytest.raises(
        ConfigError, match=r"hop_s = 1000\.0: must be under 12 s: the mesh was not at rest 120 s"
    ):
        run(slow, (0.0, 300, 3), (1.0, 300, 3))


@pytest.mark.parametrize(
    ("slow", "waited"),
    [
        (
            {"prefill_s": 1e6},
            "r0 waited for its first token of mixed-0, r1 waited for its first token of mixed-0",
        ),
        ({"step_s": 1e6}, "r0 waited for the rest of its 3 tokens of mixed-0, r1 waited for its"),
    ],
)
def test_of_requests_that_never_end_it_is_said_what_they_waited_for(
    monkeypatch: pytest.MonkeyPatch, slow: dict[str, float], waited: str
) -> None:
    monkeypatch.setattr(run_module, "STUCK_S", 600.0)
    never = mesh(pool("mixed", performance=PERFORMANCE | slow))
    with pytest.raises(SimulationError, match=f"{LATE}: ") as told:
        run(never, (0.0, 200, 3), (0.0, 200, 3))
    assert waited in str(told.value)


def test_a_backlog_that_goes_down_is_worked_off_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "STUCK_S", 600.0)
    slow = mesh(pool("mixed", performance=PERFORMANCE | {"prefill_s": 400.0}))
    cluster = run(slow, *[(0.0, 200, 1)] * 3)
    assert max(cluster.records.end_s) > 600.0


def test_what_an_instance_kept_that_has_left_is_an_error() -> None:
    simulated = mesh(
        pool("prefill", count=2), pool("decode"), scale=[{"at_s": 5.0, "pool": "prefill", "count": 1}]
    )
    cluster = run(simulated, (0.0, 100, 10), (20.0, 100, 10))
    [former] = cluster.former
    check_conserved(cluster)
    assert former.blocks.try_allocate(BlockOwner("decode", request_id_of(7), 0), 1)
    with pytest.raises(SimulationError, match=f"{former.instance_id} keeps 1 blocks"):
        check_conserved(cluster)


def test_a_run_that_loses_something_is_an_error() -> None:
    cluster = run(mesh(pool("prefill"), pool("decode")), (0.0, 100, 10))
    cluster.gateway.waiting_s += 1.0
    with pytest.raises(SimulationError, match="Little"):
        check_conserved(cluster)


def peak_bytes(requests: int, output_tokens: int) -> int:
    """Of a run in which a few are there at once."""
    load = Load(Offered(number * 0.25, 64, output_tokens) for number in range(requests))
    fast = PERFORMANCE | {"step_s": 0.002}
    simulated = mesh(pool("prefill"), pool("decode", performance=fast), scheduler={"decisions_kept": 64})
    gc.collect()
    tracemalloc.start()
    try:
        simulate(simulated, load)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_tokens() -> None:
    """Two bytes for each that is drawn would be more than requests are allowed."""
    few, many, tokens = 150, 450, 400
    grown = peak_bytes(many, tokens) - peak_bytes(few, tokens)
    assert grown < 2 * (many - few) * tokens
