"""What a run's devices did, drew and cost."""

from typing import Any

import pytest

from common.cost import SECONDS_PER_HOUR
from common.devices import H100, H200, TPU_V6E
from services.simulator.cluster import Cluster
from services.simulator.computed_work import ComputedWork
from services.simulator.config import simulated_from_tree
from services.simulator.metrics import measure
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import mesh, pool, run

ROOFLINE = {"kind": "roofline", "compute": 1.0, "memory": 1.0}
REQUESTS = ((0.0, 300, 50), (0.1, 700, 20), (2.0, 10, 5))


def rooflines(*roles: str, **keys: Any) -> Cluster:
    """LLaMA3-8B on H100s without latencies, at their peaks."""
    pools = [pool(role, device="h100", performance=ROOFLINE, **keys) for role in roles]
    simulated = simulated_from_tree({"cluster": {"model": "llama3-8b"}, "pool": pools})
    return simulate(simulated, Load([Offered(0.0, 2048, 200), Offered(0.0, 2048, 100)]))


def test_a_model_at_the_peaks_of_its_device_uses_all_of_it() -> None:
    """Long prompts are bound by computing, and steps of few sequences by memory."""
    prefill, decode = measure(rooflines("prefill", "decode")).hardware.pools
    assert prefill.mfu == pytest.approx(1.0, rel=0.01)
    assert decode.mbu == pytest.approx(1.0)
    assert prefill.mbu is not None
    assert prefill.mbu < 0.9
    assert decode.mfu is not None
    assert decode.mfu < 0.05


def test_chunks_and_steps_in_one_pass_read_the_weights_once() -> None:
    [mixed] = measure(rooflines("mixed")).hardware.pools
    assert mixed.mbu is not None
    assert mixed.mfu is not None
    assert mixed.mbu <= 1.0
    assert mixed.mfu <= 1.0
    alone, together = ComputedWork(), ComputedWork()
    alone.add_mixed([(0, 100)], 0, 0)
    alone.add_steps(4, 1000, 1)
    together.add_mixed([(0, 100)], 4, 1000)
    assert (alone.passes, together.passes) == (2, 1)
    assert (alone.rows, alone.pairs, alone.heads) == (together.rows, together.pairs, together.heads)
    assert alone.pairs == 100 * 101 // 2 + 1000


def test_steps_at_once_are_the_work_of_single_ones() -> None:
    at_once, singly = ComputedWork(), ComputedWork()
    at_once.add_steps(3, 40, 5)
    for step in range(5):
        singly.add_steps(3, 40 + 3 * step, 1)
    assert at_once == singly


def test_power_is_the_busy_share_s_and_price_the_whole_time_s() -> None:
    cluster = run(
        mesh(pool("prefill", 2, device="h100", devices=2), pool("decode", device="h200")), *REQUESTS
    )
    metrics = measure(cluster)
    hardware = metrics.hardware
    busy = [each.busy for each in metrics.pools]
    assert H100.power_w is not None
    assert H200.power_w is not None
    watts = [busy[0] * 4 * H100.power_w, busy[1] * H200.power_w]
    assert [each.mean_w for each in hardware.pools] == pytest.approx(watts)
    assert hardware.usd_h == pytest.approx(4 * H100.price_usd_h + H200.price_usd_h)
    assert hardware.usd_h is not None
    hours = metrics.elapsed_s / SECONDS_PER_HOUR
    assert hardware.requests_per_kwh == pytest.approx(3 / (sum(watts) / 1e3 * hours))
    assert hardware.requests_per_usd == pytest.approx(3 / (hardware.usd_h * hours))


def test_what_is_not_known_of_one_device_is_not_known_in_all() -> None:
    simulated = mesh(pool("prefill", device="h100"), pool("decode", device="tpu-v6e"))
    hardware = measure(run(simulated, *REQUESTS)).hardware
    assert hardware.pools[0].mean_w is not None
    assert (hardware.pools[1].mean_w, hardware.mean_w, hardware.requests_per_kwh) == (None, None, None)
    assert hardware.usd_h == pytest.approx(H100.price_usd_h + TPU_V6E.price_usd_h)
    hardware = measure(run(mesh(pool("prefill", device="h100"), pool("decode")), *REQUESTS)).hardware
    unnamed = hardware.pools[1]
    assert (unnamed.usd_h, unnamed.mfu, unnamed.mbu, unnamed.mean_w) == (None, None, None, None)
    assert (hardware.usd_h, hardware.requests_per_usd) == (None, None)
