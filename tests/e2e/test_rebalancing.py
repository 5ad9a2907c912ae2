"""Two instances that decode, one of which gets all the long streams: some leave it, and no token changes."""

import asyncio
from pathlib import Path

import openai
import pytest

from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, running_mesh, stream_text
from tests.e2e.reference import greedy_tokens

LONG, SHORT = 480, 2
PAIRS = 4
PROMPT_TOKENS = 100
BLOCK_SIZE = 32
POOL_BLOCKS = 48
"""Of which a long stream comes to need 19, so all four need 76."""
BLOCK_BYTES = 4 * 2 * 3 * 16 * 4 * BLOCK_SIZE
"""The tiny model's, in fp32."""
CONFIG = f"""
[mesh]
heartbeat_s = 0.25
[model]
context_length = {POOL_BLOCKS * BLOCK_SIZE}
[scheduler]
prefill_policy = "round_robin"
decode_policy = "round_robin"
[instance]
block_size = {BLOCK_SIZE}
kv_bytes = {POOL_BLOCKS * BLOCK_BYTES}
[gateway]
max_continuations = 100
"""


@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_streams_that_outlive_their_predictions_leave_a_full_instance_with_the_tokens_of_transformers(
    role: str, tiny_model: Path, tmp_path: Path
) -> None:
    """History knows only short outputs; round robin gives every long stream to the same instance."""
    tokenizer = Tokenizer(tiny_model)
    truth = [
        tokenizer.decode(each, skip_special_tokens=True)
        for each in greedy_tokens(tiny_model, [prompt_of(index) for index in range(PAIRS)], LONG)
    ]
    options = ("--model", str(tiny_model), "--dtype", "fp32", f"--{role}", "2")
    with running_mesh(tmp_path / "mesh", *options, config=CONFIG) as mesh:
        assert asyncio.run(run_pairs(mesh)) == truth
        assert mesh.logged("scheduler", "sequence_asked_to_leave")
        assert asyncio.run(mesh.metric(role, "lamella_sequences_left_total")) >= 1
        assert asyncio.run(mesh.left_over()) == {}


async def run_pairs(mesh: Mesh) -> list[str]:
    """Texts of the long streams; after each begins a short one, which round robin puts elsewhere."""
    streams: list[asyncio.Task[str]] = []
    async with mesh.client() as client:
        for number in range(2):
            await one_stream(client, 10 + number, SHORT, asyncio.Event())
        for index in range(PAIRS):
            has_begun = asyncio.Event()
            streams.append(asyncio.create_task(one_stream(client, index, LONG, has_begun)))
            await has_begun.wait()
            await one_stream(client, 20 + index, SHORT, asyncio.Event())
        return await asyncio.gather(*streams)


async def one_stream(
    client: openai.AsyncOpenAI, index: int, output_tokens: int, has_begun: asyncio.Event
) -> str:
    return await stream_text(client, prompt_of(index), output_tokens, has_begun)


def prompt_of(index: int) -> list[int]:
    return [100 + 37 * index + (at * 7 + index) % 900 for at in range(PROMPT_TOKENS)]
