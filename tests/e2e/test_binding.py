"""A decode instance that is chosen when the prompt is computed: by then another one is the emptier."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
from openai.types import Completion

from common.messages import LoadReport, SchedulerEvent, ServiceRecord
from common.model.tokens import Tokenizer
from tests.e2e.meshes import Mesh, get_text, running_mesh, stream_text
from tests.e2e.reference import greedy_tokens

CONFIG = """
[mesh]
lease_s = 60.0
[scheduler]
decode_binding = "late"
[instance]
block_size = 16
chunk_tokens = 4
prefill_order = "srpt"
"""
HEAVY_TOKENS, LONG_TOKENS, SHORT_TOKENS = 1600, 1500, 20
"""Prompts. In chunks of 4 the long one takes most of a second or more, and the short one passes it."""
OUTPUT_TOKENS = 200
SHORT_OUTPUT_TOKENS = 1900
"""So many that the short one is decoded for as long as the long prompt is computed."""
WAIT_S = 60.0


def test_a_sequence_is_decoded_where_there_is_room_when_its_prompt_is_computed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One stream holds most of an instance, so that the long prompt and then a short one are placed on the
    other; it leaves before the long one is computed, which waits until that is known."""
    tokenizer = Tokenizer(tiny_model)
    truth = [
        tokenizer.decode(tokens, skip_special_tokens=True)
        for prompt_tokens, output_tokens in (
            (LONG_TOKENS, OUTPUT_TOKENS),
            (SHORT_TOKENS, SHORT_OUTPUT_TOKENS),
        )
        for tokens in greedy_tokens(tiny_model, [prompt_of(prompt_tokens)], output_tokens)
    ]
    options = ("--model", str(tiny_model), "--dtype", "fp32", "--decode", "2")
    with running_mesh(tmp_path / "mesh", *options, config=CONFIG) as mesh:
        texts, placed = asyncio.run(run(mesh))
        assert texts == truth
        heavy, long, short = placed
        assert heavy != long == short
        assert asyncio.run(decode_instance_of(mesh, LONG_TOKENS)) == heavy
        assert asyncio.run(mesh.left_over()) == {}


async def run(mesh: Mesh) -> tuple[list[str], list[str | None]]:
    """Texts of the long prompt's stream and the short one's, which goes on when the other begins, and where
    all three were to be decoded before the heavy one left."""
    prefill_pid = mesh.pid_of("prefill")
    async with mesh.client() as client:
        heavy = await begin(client, prompt_of(HEAVY_TOKENS))
        long_begun, short_begun = asyncio.Event(), asyncio.Event()
        long = asyncio.create_task(stream_text(client, prompt_of(LONG_TOKENS), OUTPUT_TOKENS, long_begun))
        await wait_placed(mesh, LONG_TOKENS)
        short = asyncio.create_task(
            stream_text(client, prompt_of(SHORT_TOKENS), SHORT_OUTPUT_TOKENS, short_begun, begun_chunks=2)
        )
        await short_begun.wait()
        os.kill(prefill_pid, signal.SIGSTOP)
        try:
            prompts = (HEAVY_TOKENS, LONG_TOKENS, SHORT_TOKENS)
            placed = [await decode_instance_of(mesh, each) for each in prompts]
            async with until_it_says_it_decodes_nothing(mesh, placed[0]):
                await heavy.close()
        finally:
            os.kill(prefill_pid, signal.SIGCONT)
        await long_begun.wait()
        assert not short.done()
        return [await long, await short], placed


async def begin(client: openai.AsyncOpenAI, prompt: list[int]) -> openai.AsyncStream[Completion]:
    """A stream that has drawn its first tokens, and may draw many."""
    stream = await client.completions.create(
        model="default",
        prompt=prompt,
        max_tokens=440,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(2):
        await anext(stream)
    return stream


async def wait_placed(mesh: Mesh, prompt_tokens: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if await decode_instance_of(mesh, prompt_tokens) is not None:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def until_it_says_it_decodes_nothing(mesh: Mesh, instance_id: str | None) -> AsyncIterator[None]:
    """Waits at the end, for a report of after its beginning: schedulers hear it with us."""
    is_idle = asyncio.Event()

    def take(event: SchedulerEvent) -> None:
        match event:
            case LoadReport(instance_id=name, decode_running=0, decode_waiting=0) if name == instance_id:
                is_idle.set()

    async with mesh.bus() as bus:
        await bus.subscribe(mesh.subjects.scheduler_events(), SchedulerEvent, take)
        yield
        async with asyncio.timeout(WAIT_S):
            await is_idle.wait()


async def decode_instance_of(mesh: Mesh, prompt_tokens: int) -> str | None:
    """Of the request with such a prompt, by the scheduler's newest word; None before it is placed."""
    services = [each for each in await mesh.members() if isinstance(each, ServiceRecord)]
    [url] = [each.http_url for each in services if each.kind == "scheduler"]
    for decision in json.loads(get_text(f"{url}/decisions")):
        if decision["prompt_tokens"] - decision["drawn_tokens"] == prompt_tokens:
            taken: str = decision["choices"][-1]["taken"]
            return taken
    return None


def prompt_of(tokens: int) -> list[int]:
    return [100 + (at * 7 + tokens) % 900 for at in range(tokens)]
