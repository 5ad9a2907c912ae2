"""What steps over attention workers take of a machine's cores, by its closed forms."""

from typing import Any

import pytest

from services.simulator.attention_cost import LayerCost, WorkerShare
from services.simulator.attention_host import HostShare
from services.simulator.clock import Clock
from services.simulator.config import Simulated
from services.simulator.host import Host, Wanted
from services.simulator.host_config import HostConfig
from tests.services.simulator.meshes import PERFORMANCE, mesh, pool, run
from tests.services.simulator.test_host import CONTENTION, PREFILL_S, Worker


def over_a_worker(**sections: Any) -> Simulated:
    """A mesh whose steps take 8 ms on the model replica and 1 ms for 10 tokens on an attention worker."""
    steps = {**PERFORMANCE, "step_s": 0.008, "per_sequence_s": 0.0, "per_context_token_s": 1e-4}
    decode = {key: value for key, value in pool("decode", performance=steps).items() if key != "kv_tokens"}
    attention = pool("attention", performance=steps)
    return mesh(pool("prefill"), decode, attention, instance={"attention_workers": 1}, **sections)


def test_a_replica_and_its_worker_wait_for_each_other_on_one_core() -> None:
    def gap_s(**sections: Any) -> float:
        records = run(over_a_worker(**sections), (0.0, 100, 50)).records
        return records.end_s[0] - records.first_token_s[0]

    # But for attention that begins before K and V are there.
    assert gap_s(host={"cores": 1}) == pytest.approx(gap_s(), rel=0.01)


@pytest.mark.parametrize("context", [20, 60, 200])
def test_beside_a_prompt_three_share_a_core_but_a_replica_and_its_worker_are_one_in_turns(
    context: int,
) -> None:
    slice_s, attention_s = 0.008, 1e-4 * context
    worker = attention_s / (slice_s + attention_s)
    level = (1 - worker) / (2 - worker)
    if level < worker:
        # Then of what three have of a core nobody has more than another.
        level = 1 / (1 + 2 - worker)

    def taken_s(cores: int) -> tuple[float, float]:
        """By a prompt of 100 tokens beside a stream, and by the stream's steps meanwhile."""
        mesh = over_a_worker(host={"cores": cores})
        records = run(mesh, (0.0, context, 200), (0.05, 100, 1)).records
        alone = run(mesh, (0.0, context, 200)).records
        prompt_s = records.first_token_s[1] - records.arrival_s[1]
        return prompt_s, (records.end_s[0] - alone.end_s[0]) / prompt_s

    prompt_s, lost = taken_s(2)
    assert prompt_s == pytest.approx(PREFILL_S, rel=0.01)
    # But for attention that begins before K and V are there.
    assert lost == pytest.approx(0.0, abs=0.02)
    prompt_s, lost = taken_s(1)
    assert prompt_s == pytest.approx(PREFILL_S / level, rel=0.1)
    assert lost == pytest.approx(0.5, rel=0.01)


def test_a_chunk_makes_slices_and_attention_longer_and_steps_the_chunk() -> None:
    slice_s, attention_s, context = 0.008, 1e-4 * 60, 60
    mesh = over_a_worker(host={"cores": 3} | CONTENTION)
    records = run(mesh, (0.0, context, 200), (0.05, 100, 1)).records
    alone = run(mesh, (0.0, context, 200)).records
    prompt_s = records.first_token_s[1] - records.arrival_s[1]
    steps_per_s = 1 / (slice_s + attention_s)
    assert prompt_s == pytest.approx(1.1 * PREFILL_S + steps_per_s * 0.00004, rel=0.01)
    slowed_s = 1.1 * (slice_s + attention_s) + 0.002
    lost = (records.end_s[0] - alone.end_s[0]) / prompt_s
    assert lost == pytest.approx(1 - (slice_s + attention_s) / slowed_s, rel=0.1)


@pytest.mark.parametrize(("cores", "more"), [(1, 0.25), (2, 0.0)])
def test_taking_turns_costs_while_more_cores_are_wanted_than_there_are(cores: int, more: float) -> None:
    def gap_s(**host: float) -> float:
        mesh = over_a_worker(host={"cores": cores, "pass_s": 0.001} | host)
        records = run(mesh, (0.0, 100, 50)).records
        return records.end_s[0] - records.first_token_s[0]

    assert gap_s(turns_share=0.25) == pytest.approx((1 + more) * gap_s(), rel=0.001)


def test_attention_goes_on_after_a_slice_and_not_beside_it_where_a_core_is_shared() -> None:
    """Half of what a slice computes is K and V, beside which attention over what is cached has begun."""
    layer = LayerCost(0.002, 0.0027, 0.0025, 0.0, 0.0, 0.0, (WorkerShare(("worker",), 0.0015, 0.0, 0.0),))
    host = Host(HostConfig(cores=1, turns_share=0.1), Clock())
    replica, other = Worker(), Worker()
    share = HostShare(host, busiest=0.4, in_turns=Wanted(1.0))
    host.want(replica, Wanted(0.6), Wanted(0.4, 0.4))
    assert share.slowed(layer, 4, replica) == layer
    host.want(other, Wanted(1.0))
    level = 1 / (1 + 0.6 + 1)
    assert (host.level, host.level_if(replica, Wanted(1.0))) == pytest.approx((level, 0.5))
    assert host.level_if(replica, Wanted(0.0)) == 1.0
    slowed = share.slowed(layer, 4, replica)
    assert slowed.slice_s == pytest.approx(0.002 / level)
    # Who takes turns has half of the core for both; the network takes what it took.
    assert slowed.offline_s == pytest.approx(1.1 * (0.002 + 0.0015) / 0.5)
    assert slowed.alone_s == pytest.approx(slowed.offline_s + 0.0002)


@pytest.mark.parametrize("hold_s", [0.1, 0.5])
def test_layers_take_turns_for_a_while_after_more_cores_were_wanted_than_there_are(hold_s: float) -> None:
    """A stream beside one prompt: slices, attention and a pass, and what they bring about, on two cores."""
    share = 0.25

    def ended_s(**host: float) -> float:
        mesh = over_a_worker(host={"cores": 2, "pass_s": 0.001} | host)
        return run(mesh, (0.0, 60, 200), (0.05, 100, 1)).records.end_s[0]

    held_s = ended_s(turns_share=share, turns_hold_s=hold_s) - ended_s(turns_share=share)
    assert held_s == pytest.approx(share / (1 + share) * hold_s, rel=0.1)
