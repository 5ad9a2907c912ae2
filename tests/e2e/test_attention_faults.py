"""Attention workers and model workers that die or pause: streams go on with the tokens they would have had."""

import asyncio
import os
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh

CONFIG = """
[mesh]
heartbeat_s = 0.5
lease_s = 1.0
[instance]
block_size = 16
"""
STREAMS = 4
OUTPUT_TOKENS = 60


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two decode instances, each with an attention worker of its own, and exact arithmetic."""
    directory = tmp_path_factory.mktemp("attention") / "mesh"
    options = ("--decode", "2", "--attention", "2", "--dtype", "fp32")
    with running_mesh(directory, *options, config=CONFIG) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("role", "number"),
    [("attention", signal.SIGKILL), ("decode", signal.SIGKILL), ("attention", signal.SIGSTOP)],
    ids=["attention killed", "decode killed", "attention paused"],
)
def test_losing_a_side_of_the_exchange_changes_no_token(
    mesh: Mesh, role: str, number: signal.Signals
) -> None:
    pid = mesh.pid_of(role)

    async def run(disturb: bool) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=3) as client:
            streams = [asyncio.create_task(one_stream(client, index)) for index in range(STREAMS)]
            await asyncio.sleep(2.0)
            if disturb:
                os.kill(pid, number)
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(run(disturb=False))
    try:
        assert asyncio.run(run(disturb=True)) == undisturbed
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    asyncio.run(both_are_back(mesh))
    assert asyncio.run(mesh.left_over()) == {}


async def both_are_back(mesh: Mesh) -> None:
    """A paused worker ends when it goes on and finds its instance gone; its successor is bound anew."""
    async with asyncio.timeout(60):
        while True:
            instances = mesh.status()["instances"]
            if len(instances) == 3 and all(each["state"] == "ready" for each in instances):
                return
            await asyncio.sleep(0.5)


async def one_stream(client: openai.AsyncOpenAI, index: int) -> str:
    stream = await client.completions.create(
        model="default",
        prompt=list(range(100, 140 + index)),
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        timeout=120,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
