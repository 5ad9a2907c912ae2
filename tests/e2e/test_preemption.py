"""A decode instance whose pool is too small for its streams: however they wait, the tokens are the same."""

import asyncio
import re
from pathlib import Path

import openai
import pytest

from common.messages import ServiceRecord
from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, get_text, running_mesh
from tests.e2e.reference import greedy_tokens

STREAMS = 4
PROMPT_TOKENS = 100
OUTPUT_TOKENS = 400
BLOCK_SIZE = 32
POOL_BLOCKS = 36
"""Of which one stream comes to need 16, so all four need 64."""
BLOCK_BYTES = 4 * 2 * 3 * 16 * 4 * BLOCK_SIZE
"""The tiny model's, in fp32."""


@pytest.mark.parametrize("swap_bytes", [POOL_BLOCKS * BLOCK_BYTES, 0], ids=["swapped", "computed again"])
def test_preempted_streams_go_on_as_transformers_does(
    tiny_model: Path, tmp_path: Path, swap_bytes: int
) -> None:
    """Swapped, nothing is computed twice and nobody is continued; without a host tier, both happen."""
    tokenizer = Tokenizer(tiny_model)
    truth = [
        tokenizer.decode(each, skip_special_tokens=True)
        for each in greedy_tokens(tiny_model, [prompt_of(seed) for seed in range(STREAMS)], OUTPUT_TOKENS)
    ]
    config = f"""
[model]
context_length = {POOL_BLOCKS * BLOCK_SIZE}
[instance]
block_size = {BLOCK_SIZE}
kv_bytes = {POOL_BLOCKS * BLOCK_BYTES}
swap_bytes = {swap_bytes}
[gateway]
max_continuations = 100
"""
    options = ("--model", str(tiny_model), "--dtype", "fp32")
    with running_mesh(tmp_path / "mesh", *options, config=config) as mesh:
        before, _, _ = asyncio.run(counts(mesh))
        assert asyncio.run(run_streams(mesh)) == truth
        prompts, continued, swaps = asyncio.run(counts(mesh))
        if swap_bytes:
            assert swaps >= 2
            assert swaps % 2 == 0, "a sequence went to the host tier and did not come back"
            assert (prompts - before, continued) == (STREAMS * PROMPT_TOKENS, 0)
        else:
            assert swaps == 0
            assert continued >= 1
            assert prompts - before > STREAMS * PROMPT_TOKENS
        assert asyncio.run(mesh.left_over()) == {}


async def run_streams(mesh: Mesh) -> list[str]:
    async with mesh.client() as client:
        return await asyncio.gather(*(one_stream(client, seed) for seed in range(STREAMS)))


async def one_stream(client: openai.AsyncOpenAI, seed: int) -> str:
    stream = await client.completions.create(
        model="default",
        prompt=prompt_of(seed),
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        timeout=120,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def counts(mesh: Mesh) -> tuple[float, float, float]:
    """Prompt tokens that were computed, sequences that were continued, copies to the host tier or back."""
    [url] = [
        each.http_url
        for each in await mesh.members()
        if isinstance(each, ServiceRecord) and each.kind == "gateway"
    ]
    text = get_text(f"{url}/metrics")
    continued = re.findall(r"^lamella_requests_resumed_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    swaps = await mesh.metric("decode", "lamella_swaps_total")
    return await mesh.prompt_tokens_computed(), sum(map(float, continued)), swaps


def prompt_of(seed: int) -> list[int]:
    return [100 + 37 * seed + (at * 7 + seed) % 900 for at in range(PROMPT_TOKENS)]
