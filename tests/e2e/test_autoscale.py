"""The number of instances follows the load, up and down, and no request notices."""

import asyncio
from collections.abc import Iterator

import pytest

from common.scaling import DesiredCounts
from tests.e2e.meshes import Mesh, running_mesh
from tests.e2e.traffic import Traffic

CONFIG = """
[instance]
engine = "emulated"
block_size = 16
max_decode_batch = 8
[emulation]
prefill_base_s = 0.02
prefill_per_token_s = 0.001
decode_base_s = 0.2
decode_per_sequence_s = 0.002
total_blocks = 1024
[objectives]
ttft_s = 1.0
tpot_s = 0.4
[scaling]
window_s = 1.0
up_cooldown_s = 1.0
down_after_s = 8.0
"""
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 11
CALM_PER_S, BUSY_PER_S = 1.5, 7.0
"""A sequence is decoded for two seconds: an instance's eight keep up with some four a second."""
FOLLOWS_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("autoscale") / "mesh"
    options = ("--autoscale", "--max", "prefill=2", "--max", "decode=3")
    with running_mesh(directory, *options, config=CONFIG) as mesh:
        yield mesh


def test_instances_follow_the_load_up_and_down_and_no_request_fails(mesh: Mesh) -> None:
    asyncio.run(load_that_rises_and_falls(mesh))
    plan = asyncio.run(latest_plan(mesh))
    assert {each.service for each in plan.counts} == {"gateway", "prefill", "decode"}
    assert all(each.reason for each in plan.counts)
    said = mesh.lamella("scale", "--show")
    assert "requests/s of 100 + 11 tokens" in said
    assert "decode" in said
    logged = (mesh.state_dir / "logs" / "supervisor.log").read_text()
    assert '"event": "scaling"' in logged or '"event":"scaling"' in logged
    assert asyncio.run(mesh.left_over()) == {}


async def load_that_rises_and_falls(mesh: Mesh) -> None:
    async with Traffic(mesh, CALM_PER_S, PROMPT_TOKENS, OUTPUT_TOKENS) as traffic:
        await asyncio.sleep(8.0)
        assert await decode_instances(mesh) == 1, "what is there suffices"
        traffic.rate_per_s = BUSY_PER_S
        await wait_decode_instances(mesh, 3)
        traffic.rate_per_s = CALM_PER_S
        await wait_decode_instances(mesh, 1)
    assert traffic.served > 0
    assert traffic.failures == []


async def decode_instances(mesh: Mesh) -> int:
    members = await mesh.members()
    return sum(getattr(each, "role", None) == "decode" for each in members)


async def wait_decode_instances(mesh: Mesh, count: int) -> None:
    async with asyncio.timeout(FOLLOWS_TIMEOUT_S):
        while True:
            if await decode_instances(mesh) == count:
                return
            await asyncio.sleep(0.5)


async def latest_plan(mesh: Mesh) -> DesiredCounts:
    async with mesh.store() as store:
        plan = await store.read_plan()
    assert plan is not None
    return plan
