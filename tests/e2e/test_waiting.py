"""A burst at a mesh that defers where prompts go: and a scheduler that dies with a full room."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh

BIND_BELOW_TOKENS = 16
CONFIG = f"""
[mesh]
heartbeat_s = 0.5
lease_s = 1.0
call_timeout_s = 2.0
[scheduler]
prefill_policy = "deferred"
bind_below_tokens = {BIND_BELOW_TOKENS}
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.002
prefill_base_s = 0.3
total_blocks = 256
"""
REQUESTS = 40
"""0.3 s each, at two instances: six seconds of work."""
OUTPUT_TOKENS = 5


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("waiting") / "mesh"
    with running_mesh(directory, "--prefill", "2", "--decode", "1", config=CONFIG) as mesh:
        yield mesh


async def burst(client: openai.AsyncOpenAI) -> list[str]:
    async def one(number: int) -> str:
        prompt = f"Request number {number} of a burst, whose prompt has some thirty tokens or so in all."
        answer = await client.completions.create(
            model="default",
            prompt=prompt,
            max_tokens=OUTPUT_TOKENS,
            seed=number,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == OUTPUT_TOKENS
        return answer.choices[0].text

    return await asyncio.gather(*(one(number) for number in range(REQUESTS)))


def test_a_burst_waits_at_the_scheduler_and_nobody_is_bound_to_a_queue(mesh: Mesh) -> None:
    async def run() -> None:
        async with mesh.client() as client:
            await burst(client)

    asyncio.run(run())
    decisions = json.loads(mesh.lamella("explain", "--newest", str(REQUESTS), "--json"))
    assert len(decisions) == REQUESTS
    for decision in decisions:
        scores = {each["instance_id"]: each["score"] for each in decision["choices"][0]["candidates"]}
        assert scores[decision["choices"][0]["taken"]] < BIND_BELOW_TOKENS
    assert asyncio.run(mesh.left_over()) == {}


def test_who_waits_at_a_scheduler_that_dies_waits_at_the_next_one(mesh: Mesh) -> None:
    scheduler = mesh.pid_of("scheduler")

    async def run() -> None:
        async with mesh.client() as client:
            before = asyncio.create_task(burst(client))
            # All have been told that they wait: one that has heard nothing yet would be refused.
            await asyncio.sleep(3.0)
            os.kill(scheduler, signal.SIGKILL)
            texts = await before
            assert texts == await burst(client)

    asyncio.run(run())
    assert asyncio.run(mesh.left_over()) == {}
