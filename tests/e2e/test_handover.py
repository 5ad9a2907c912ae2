"""KV handed over layer by layer, in the gaps between others' steps: the tokens are those of transformers."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, running_mesh, stream_text
from tests.e2e.reference import greedy_tokens

PROMPT_TOKENS = (700, 130, 520, 96)
OUTPUT_TOKENS = 24
TINY_OUTPUT_TOKENS = 150
"""For the next prompt to come before they have ended."""
LEFT_OUTPUT_TOKENS = 1200
"""Of streams whose clients leave."""
STREAMS = 4
WATCH_S = 60.0
SHAPES = {
    "local, shared memory": ((), "shared_memory", "pull"),
    "local, Mooncake, pushed": ((), "mooncake", "push"),
    "attention by heads, pushed": (("--attention", "3", "--partition", "heads"), "auto", "push"),
    "attention by requests, Mooncake": (("--attention", "2", "--partition", "requests"), "mooncake", "pull"),
}


def settings(path: str, mode: str = "pull") -> str:
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
mode = "{mode}"
layerwise_min_tokens = 1
"""


@pytest.fixture(scope="module")
def truth(tiny_model: Path) -> list[str]:
    """How transformers goes on with every stream's prompt."""
    prompts = [prompt_of(index) for index in range(STREAMS)]
    tokenizer = Tokenizer(tiny_model)
    tokens = greedy_tokens(tiny_model, prompts, TINY_OUTPUT_TOKENS)
    return [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_transformers_while_others_come_and_leave(
    shape: str, tiny_model: Path, truth: list[str], tmp_path: Path
) -> None:
    arguments, path, mode = SHAPES[shape]
    options = ("--model", str(tiny_model), "--dtype", "fp32", *arguments)
    with running_mesh(tmp_path / "mesh", *options, config=settings(path, mode)) as mesh:
        assert asyncio.run(complete_while_others_leave(mesh)) == truth
        assert asyncio.run(mesh.left_over()) == {}


async def complete_while_others_leave(mesh: Mesh) -> list[str]:
    """Every prompt joins while the one before is decoded; between them comes one whose client leaves."""
    streams = []
    async with mesh.client() as client:
        for index in range(STREAMS):
            begun = asyncio.Event()
            streams.append(asyncio.create_task(text_of(client, index, begun, TINY_OUTPUT_TOKENS)))
            await leave(client, index)
            await begun.wait()
        return await asyncio.gather(*streams)


async def leave(client: openai.AsyncOpenAI, index: int) -> None:
    """After a while in which its prompt may be queued, computed, handed over or decoded."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05 + 0.1 * index):
            await text_of(client, 10 + index, asyncio.Event(), LEFT_OUTPUT_TOKENS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two instances of each role, and a model whose prompts take long enough to be killed amid."""
    directory = tmp_path_factory.mktemp("pairs") / "mesh"
    options = ("--dtype", "fp32", "--prefill", "2", "--decode", "2")
    with running_mesh(directory, *options, config=settings("auto")) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def undisturbed(pairs: Mesh) -> list[str]:
    return asyncio.run(run_two(pairs, None))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_who_dies_amid_a_layerwise_pull_costs_no_token(
    pairs: Mesh, undisturbed: list[str], role: str
) -> None:
    asyncio.run(pairs.wait_ready(4))
    assert asyncio.run(run_two(pairs, role)) == undisturbed
    assert asyncio.run(pairs.left_over()) == {}


async def run_two(mesh: Mesh, kill: str | None) -> list[str]:
    killed = None if kill is None else mesh.pid_of(kill)
    moved_before = await kv_bytes_moved(mesh)
    async with mesh.client() as client:
        streams = [asyncio.create_task(text_of(client, index, asyncio.Event())) for index in range(2)]
        if killed is not None:
            await wait_until_pulled(mesh, moved_before)
            os.kill(killed, signal.SIGKILL)
        return await asyncio.gather(*streams)


async def wait_until_pulled(mesh: Mesh, moved_before: float) -> None:
    """A prompt is being computed, and some of its KV has moved already."""
    async with asyncio.timeout(WATCH_S):
        while True:
            is_moving = await kv_bytes_moved(mesh) > moved_before
            if is_moving and await mesh.metric("prefill", "lamella_pending_prefill_tokens") > 0:
                return


async def kv_bytes_moved(mesh: Mesh) -> float:
    return await mesh.metric("prefill", "lamella_transfer_bytes_total")


def prompt_of(index: int) -> list[int]:
    tokens = PROMPT_TOKENS[index % len(PROMPT_TOKENS)]
    return [100 + 37 * index + (at * 7 + index) % 900 for at in range(tokens)]


async def text_of(
    client: openai.AsyncOpenAI, index: int, begun: asyncio.Event, output_tokens: int = OUTPUT_TOKENS
) -> str:
    """What a stream says. ``begun`` is set with its first token."""
    return await stream_text(client, prompt_of(index), output_tokens, begun)
