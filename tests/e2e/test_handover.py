"""KV handed over layer by layer, in the gaps between others' steps: the tokens are those of serialized KV."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh

PROMPT_TOKENS = (700, 130, 520, 96)
OUTPUT_TOKENS = 24
STREAMS = 4
SHAPES = {
    "local, shared memory": ((), "shared_memory"),
    "local, Mooncake": ((), "mooncake"),
    "attention by heads": (("--attention", "3", "--partition", "heads"), "auto"),
    "attention by requests, Mooncake": (("--attention", "2", "--partition", "requests"), "mooncake"),
}


def settings(path: str, layerwise_min_tokens: int) -> str:
    """Prompts of several chunks, blocks of part of one, and portions of part of a layer."""
    return f"""
[mesh]
heartbeat_s = 0.5
lease_s = 1.0
[instance]
chunk_tokens = 200
block_size = 32
[transfer]
path = "{path}"
layerwise_min_tokens = {layerwise_min_tokens}
"""


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_kv_in_one_piece(shape: str, tmp_path: Path) -> None:
    arguments, path = SHAPES[shape]
    texts = []
    for layerwise_min_tokens in (1_000_000, 1):
        config = settings(path, layerwise_min_tokens)
        directory = tmp_path / f"from-{layerwise_min_tokens}"
        with running_mesh(directory, "--dtype", "fp32", *arguments, config=config) as mesh:
            texts.append(asyncio.run(complete_while_others_leave(mesh)))
            assert asyncio.run(mesh.left_over()) == {}
    assert texts[0] == texts[1]


async def complete_while_others_leave(mesh: Mesh) -> list[str]:
    """Every prompt joins while the one before is decoded; between them comes one whose client leaves."""
    streams = []
    async with client_of(mesh) as client:
        for index in range(STREAMS):
            begun = asyncio.Event()
            streams.append(asyncio.create_task(text_of(client, index, begun)))
            await leave(client, index)
            await begun.wait()
        return await asyncio.gather(*streams)


async def leave(client: openai.AsyncOpenAI, index: int) -> None:
    """After a while in which its prompt may be queued, computed, handed over or decoded."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1 + 0.3 * index):
            await text_of(client, 10 + index, asyncio.Event(), OUTPUT_TOKENS * 50)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_who_dies_amid_a_layerwise_pull_costs_no_token(role: str, tmp_path: Path) -> None:
    options = ("--dtype", "fp32", f"--{role}", "2")
    with running_mesh(tmp_path / "mesh", *options, config=settings("auto", 1)) as mesh:

        async def run(kill: bool) -> list[str]:
            async with client_of(mesh) as client:
                streams = [asyncio.create_task(text_of(client, index, asyncio.Event())) for index in range(2)]
                if kill:
                    await wait_until_pulled(mesh)
                    os.kill(mesh.pid_of(role), signal.SIGKILL)
                return await asyncio.gather(*streams)

        undisturbed = asyncio.run(run(kill=False))
        before = len(mesh.status()["instances"])
        assert asyncio.run(run(kill=True)) == undisturbed
        assert asyncio.run(mesh.left_over()) == {}
        assert before == 3


async def wait_until_pulled(mesh: Mesh) -> None:
    """A prompt is being computed, and some of its KV has moved already."""
    async for moved, pending in kv_moved_and_prompt_tokens_pending(mesh):
        if moved and pending:
            return


async def kv_moved_and_prompt_tokens_pending(mesh: Mesh) -> AsyncIterator[tuple[bool, bool]]:
    begun = await mesh.metric("prefill", "lamella_transfer_bytes_total")
    async with asyncio.timeout(30):
        while True:
            moved = await mesh.metric("prefill", "lamella_transfer_bytes_total") > begun
            yield moved, await mesh.metric("prefill", "lamella_pending_prefill_tokens") > 0


def client_of(mesh: Mesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)


async def text_of(
    client: openai.AsyncOpenAI, index: int, begun: asyncio.Event, output_tokens: int = OUTPUT_TOKENS
) -> str:
    """What a stream says. ``begun`` is set with its first token."""
    first = 100 + 37 * index
    stream = await client.completions.create(
        model="default",
        prompt=[first + (at * 7 + index) % 900 for at in range(PROMPT_TOKENS[index % len(PROMPT_TOKENS)])],
        max_tokens=output_tokens,
        temperature=0,
        stream=True,
        timeout=120,
        extra_body={"ignore_eos": True},
    )
    texts = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        begun.set()
    return "".join(texts)
