"""The only process of its kind dies amid streams: these, and who comes while nobody is there, wait for its
next life."""

import asyncio
import os
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh

CONFIG = """
[gateway]
wait_for_instance_s = 60
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.01
prefill_base_s = 0.05
total_blocks = 256
"""
REQUESTS = 6
BEGUN_S = 0.6
"""Each of the first has some tokens by then, and none has all."""
APART_S = 0.05
OUTPUT_TOKENS = 150


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("last") / "mesh"
    with running_mesh(directory, "--prefill", "1", "--decode", "1", config=CONFIG) as mesh:
        yield mesh


@pytest.mark.parametrize("kind", ["decode", "prefill", "scheduler"])
def test_nobody_is_refused_who_runs_or_comes_when_it_ends(mesh: Mesh, kind: str) -> None:
    """Of those that come the first does within milliseconds, before anybody may have noticed."""
    joined = len(mesh.logged("scheduler", "instance_joined"))

    async def run(killed: int | None) -> list[str]:
        async with mesh.client() as client:
            answers = [asyncio.create_task(answer_of(client, seed)) for seed in range(REQUESTS)]
            await asyncio.sleep(BEGUN_S)
            if killed is not None:
                os.kill(killed, signal.SIGKILL)
            for seed in range(REQUESTS, 2 * REQUESTS):
                answers.append(asyncio.create_task(answer_of(client, seed)))
                await asyncio.sleep(APART_S)
            return await asyncio.gather(*answers)

    undisturbed = asyncio.run(run(None))
    assert asyncio.run(run(mesh.pid_of(kind))) == undisturbed
    assert asyncio.run(mesh.left_over()) == {}
    back = mesh.logged("scheduler", "instance_joined")[joined:]
    if kind == "scheduler":
        assert mesh.logged("scheduler", "scheduler_gone"), "who had no answer from its former life asks again"
        assert {each["instance"] for each in back} == {"prefill-0", "decode-0"}, "its own log tells of both"
    else:
        assert [(each["instance"], each["role"]) for each in back] == [(f"{kind}-0", kind)]
    assert not mesh.logged("scheduler", "not_resumed"), "there are no attention workers to have kept KV"


async def answer_of(client: openai.AsyncOpenAI, seed: int) -> str:
    """One that is refused raises."""
    answer = await client.completions.create(
        model="default",
        prompt=f"Who is there? {seed}",
        max_tokens=OUTPUT_TOKENS,
        seed=seed,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text
