"""Roles by policy under load: a decode instance helps with prompts and goes home, and no token is another."""

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest

from common.messages import ServiceRecord
from tests.e2e.meshes import Mesh, get_text, running_mesh

CONFIG = """
[instance]
engine = "emulated"
block_size = 16
[emulation]
prefill_base_s = 0.02
prefill_per_token_s = 0.0005
decode_base_s = 0.01
total_blocks = 4096
[roles]
policy = "overflow"
look_s = 0.1
cool_down_s = 0.5
overflow_queue_s = 1.0
overflow_queue_tokens = 2000
settle_s = 3.0
"""
PROMPTS = 20
PROMPT_TOKENS = 800
OUTPUT_TOKENS = 24
APART_S = 0.2
WAIT_S = 90.0
HOME = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("roles") / "mesh"
    with running_mesh(directory, "--decode", "2", config=CONFIG) as mesh:
        yield mesh


def test_a_burst_of_long_prompts_overflows_into_the_decode_pool_and_everybody_is_home_afterwards(
    mesh: Mesh,
) -> None:
    async def work() -> None:
        async with client_of(mesh) as client:
            undisturbed = [await one_stream(client, seed) for seed in range(PROMPTS)]
            assert await role_changes(mesh) == []
            burst = []
            for seed in range(PROMPTS):
                burst.append(asyncio.create_task(one_stream(client, seed)))
                await asyncio.sleep(APART_S)
            assert await asyncio.gather(*burst) == undisturbed
        changes = await changes_until_home(mesh)
        for returned, helped in zip(changes[::2], changes[1::2], strict=True):
            assert (helped["role"], helped["refusal"]) == ("mixed", None)
            assert "of its bound" in str(helped["reason"])
            assert (returned["role"], returned["refusal"]) == ("decode", None)
            assert "needs no help" in str(returned["reason"])
            # Of the two that decode, one always does nothing else.
            assert returned["instance_id"] == helped["instance_id"] != "prefill-0"

    asyncio.run(work())
    assert asyncio.run(mesh.left_over()) == {}
    assert roles(mesh) == homes(mesh) == HOME
    # It computed prompts meanwhile.
    assert asyncio.run(mesh.metric("decode", "lamella_prefill_tokens_total")) > 0


async def changes_until_home(mesh: Mesh) -> list[dict[str, object]]:
    """The newest first, once somebody has helped and gone home."""
    async with asyncio.timeout(WAIT_S):
        while True:
            changes = await role_changes(mesh)
            if changes and changes[0]["role"] != "mixed":
                return changes
            await asyncio.sleep(0.1)


def roles(mesh: Mesh) -> dict[str, object]:
    return {str(each["id"]): each["role"] for each in mesh.status()["instances"]}


def homes(mesh: Mesh) -> dict[str, object]:
    return {str(each["id"]): each["home"] for each in mesh.status()["instances"]}


async def role_changes(mesh: Mesh) -> list[dict[str, object]]:
    services = [each for each in await mesh.members() if isinstance(each, ServiceRecord)]
    [url] = [each.http_url for each in services if each.kind == "scheduler"]
    changes: list[dict[str, object]] = json.loads(get_text(f"{url}/roles"))
    return changes


def client_of(mesh: Mesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)


async def one_stream(client: openai.AsyncOpenAI, seed: int) -> str:
    stream = await client.completions.create(
        model="default",
        prompt=list(range(100 + seed, 100 + seed + PROMPT_TOKENS)),
        max_tokens=OUTPUT_TOKENS,
        temperature=1,
        seed=seed,
        stream=True,
        timeout=WAIT_S,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
