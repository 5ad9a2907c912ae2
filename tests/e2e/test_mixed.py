"""Mixed instances alone, by their policies: transformers' tokens, whoever dies, and nothing left behind."""

import asyncio
import os
import signal
from pathlib import Path

import openai
import pytest

from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, running_mesh
from tests.e2e.reference import greedy_tokens

STREAMS = 12
OUTPUT_TOKENS = 200
STAGGER_S = 0.05
"""From stream to stream, so that prompts come amid decodes."""
CONFIG = """
[mesh]
heartbeat_s = 0.5
lease_s = 1.0
[instance]
block_size = 16
chunk_tokens = 48
"""


@pytest.mark.parametrize(
    "policy",
    [
        'mixed_policy = "chunked"',
        'mixed_policy = "prefill_first"\nmixed_max_wait_s = 0.05',
        'mixed_policy = "splitwise"',
        'mixed_policy = "orca"\ndecode_admission = "reserve_peak"\nmax_decode_batch = 8',
    ],
)
def test_prompts_amid_decodes_and_a_death_change_no_token(
    policy: str, tiny_model: Path, tmp_path: Path
) -> None:
    prompts = [list(range(100 + seed, 110 + 30 * seed)) for seed in range(STREAMS)]
    tokenizer = Tokenizer(tiny_model)
    truth = [
        tokenizer.decode(each, skip_special_tokens=True)
        for each in greedy_tokens(tiny_model, prompts, OUTPUT_TOKENS)
    ]
    options = ("--model", str(tiny_model), "--dtype", "fp32", "--mixed", "2")
    with running_mesh(tmp_path / "mesh", *options, config=CONFIG + policy) as mesh:
        assert {each["role"] for each in mesh.status()["instances"]} == {"mixed"}
        assert asyncio.run(run(mesh, prompts, kill=False)) == truth
        assert asyncio.run(mesh.metric("mixed", "lamella_transfer_bytes_total")) == 0
        assert asyncio.run(run(mesh, prompts, kill=True)) == truth
        assert asyncio.run(mesh.left_over()) == {}


async def run(mesh: Mesh, prompts: list[list[int]], *, kill: bool) -> list[str]:
    """The streams' texts. ``kill``: an instance, when each stream has begun."""
    begun = asyncio.Barrier(len(prompts) + 1)
    killed = mesh.pid_of("mixed")
    async with mesh.client() as client:
        streams = [
            asyncio.create_task(one_stream(client, prompt, STAGGER_S * number, begun))
            for number, prompt in enumerate(prompts)
        ]
        await begun.wait()
        if kill:
            os.kill(killed, signal.SIGKILL)
        return await asyncio.gather(*streams)


async def one_stream(
    client: openai.AsyncOpenAI, prompt: list[int], delay_s: float, begun: asyncio.Barrier
) -> str:
    await asyncio.sleep(delay_s)
    stream = await client.completions.create(
        model="default",
        prompt=prompt,
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        stream=True,
        timeout=120,
        extra_body={"ignore_eos": True},
    )
    texts: list[str] = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if len(texts) == 2:
            await begun.wait()
    return "".join(texts)
