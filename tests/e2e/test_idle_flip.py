"""A policy flips an instance whose kind idles: its streams move, and it goes back when the load shifts."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai

from common.messages import ServiceRecord
from tests.e2e.meshes import Mesh, get_text, running_mesh, stream_text

CONFIG = """
[mesh]
lease_s = 60
[instance]
engine = "emulated"
block_size = 16
prefill_order = "srpt"
[emulation]
decode_base_s = 0.02
prefill_per_token_s = 0.0005
total_blocks = 512
[roles]
policy = "idle_flip"
look_s = 0.1
cool_down_s = 0.5
idle_s = 3.0
idle_share = 0.8
loaded_share = 0.9
"""
"""Idle is who has worked for less than 0.8 of the time, so that the flipped one has streams: they begin after
the prompts that keep the other kind busy."""
STREAMS = 4
OUTPUT_TOKENS = 700
PROMPT_TOKENS = 400
PROMPTS_AT_ONCE = 4
WAIT_S = 60.0


def test_who_idles_is_flipped_amid_its_streams_and_back_and_no_token_is_another(tmp_path: Path) -> None:
    with running_mesh(tmp_path / "mesh", "--decode", "2", config=CONFIG) as mesh:
        undisturbed = asyncio.run(run_streams(mesh))
        assert asyncio.run(role_changes(mesh)) == []
        assert asyncio.run(run_shifting(mesh)) == undisturbed
        back, there = asyncio.run(role_changes(mesh))
        assert (there["role"], there["refusal"]) == ("prefill", None)
        assert (back["role"], back["refusal"]) == ("decode", None)
        assert "all that prefill for" in str(there["reason"])
        assert "all that decode for" in str(back["reason"])
        # Moved, not computed anew.
        assert asyncio.run(continued(mesh)) == 0
        assert asyncio.run(mesh.left_over()) == {}


async def run_streams(mesh: Mesh) -> list[str]:
    async with mesh.client() as client:
        return await asyncio.gather(*streams_of(client))


async def run_shifting(mesh: Mesh) -> list[str]:
    """Prompts until one that decodes has been flipped; then none, until one is flipped back."""
    async with mesh.client() as client:
        async with busy_with_prompts(client):
            streams = streams_of(client)
            await wait_changes(mesh, 1)
            await wait_moved(mesh)
        await wait_changes(mesh, 2)
        assert not any(stream.done() for stream in streams)
        return await asyncio.gather(*streams)


@asynccontextmanager
async def busy_with_prompts(client: openai.AsyncOpenAI) -> AsyncIterator[None]:
    """From the first answer on."""
    has_begun = asyncio.Event()

    async def ask(seed: int) -> None:
        for number in itertools.count():
            prompt = [1000 + seed, 1000 + number % 1000] * (PROMPT_TOKENS // 2)
            await client.completions.create(model="default", prompt=prompt, max_tokens=1, timeout=WAIT_S)
            has_begun.set()

    tasks = [asyncio.create_task(ask(seed)) for seed in range(PROMPTS_AT_ONCE)]
    await has_begun.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def streams_of(client: openai.AsyncOpenAI) -> list[asyncio.Future[str]]:
    prompts = [list(range(100, 120 + seed)) for seed in range(STREAMS)]
    return [
        asyncio.ensure_future(stream_text(client, prompt, OUTPUT_TOKENS, asyncio.Event()))
        for prompt in prompts
    ]


async def wait_changes(mesh: Mesh, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if len(await role_changes(mesh)) >= count:
                return
            await asyncio.sleep(0.1)


async def wait_moved(mesh: Mesh) -> None:
    """Until all run where sequences are still decoded: some are on their way as the role changes."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if await mesh.metric("decode", "lamella_requests_running") == STREAMS:
                return
            await asyncio.sleep(0.1)


async def role_changes(mesh: Mesh) -> list[dict[str, object]]:
    """The newest first."""
    changes: list[dict[str, object]] = json.loads(get_text(f"{await url_of(mesh, 'scheduler')}/roles"))
    return changes


async def continued(mesh: Mesh) -> float:
    text = get_text(f"{await url_of(mesh, 'gateway')}/metrics")
    found = re.findall(r"^lamella_requests_resumed_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def url_of(mesh: Mesh, kind: str) -> str:
    services = [each for each in await mesh.members() if isinstance(each, ServiceRecord)]
    [url] = [each.http_url for each in services if each.kind == kind]
    return url
