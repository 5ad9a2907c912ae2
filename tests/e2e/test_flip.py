"""Roles that change under load: streams go on with the tokens they would have had, and nothing is loaded."""

import asyncio
import re
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh

CONFIG = """
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.02
prefill_base_s = 0.02
total_blocks = 256
"""
STREAMS = 8
OUTPUT_TOKENS = 150
SWITCH_MS = 10.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("flip") / "mesh"
    with running_mesh(directory, "--prefill", "2", "--decode", "2", config=CONFIG) as mesh:
        yield mesh


def test_an_instance_changes_its_role_under_load_and_back(mesh: Mesh) -> None:
    undisturbed = asyncio.run(texts(mesh))
    assert asyncio.run(texts(mesh, "decode-1", "prefill")) == undisturbed
    assert roles(mesh)["decode-1"] == "prefill"
    assert asyncio.run(texts(mesh)) == undisturbed
    assert asyncio.run(texts(mesh, "decode-1", "decode")) == undisturbed
    assert roles(mesh)["decode-1"] == "decode"
    assert asyncio.run(mesh.left_over()) == {}


async def texts(mesh: Mesh, *flip: str) -> list[str]:
    """Of all streams, amid which one instance's role changes."""
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        streams = [asyncio.create_task(one_stream(client, seed)) for seed in range(STREAMS)]
        await asyncio.sleep(1.0)
        if flip:
            said = await asyncio.to_thread(mesh.lamella, "flip", *flip)
            switched_ms = re.search(r"switched in (\S+) ms", said)
            assert switched_ms is not None, said
            assert float(switched_ms[1]) <= SWITCH_MS
        return await asyncio.gather(*streams)


def roles(mesh: Mesh) -> dict[str, str]:
    return {str(each["id"]): str(each["role"]) for each in mesh.status()["instances"]}


async def one_stream(client: openai.AsyncOpenAI, seed: int) -> str:
    stream = await client.completions.create(
        model="default",
        prompt=list(range(100, 140 + seed)),
        max_tokens=OUTPUT_TOKENS,
        seed=seed,
        stream=True,
        timeout=60,
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
