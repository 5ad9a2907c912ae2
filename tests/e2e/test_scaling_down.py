"""An operator scales decode from three instances to one while requests run and arrive: no client notices."""

import asyncio
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh, stream_text
from tests.e2e.traffic import Traffic

CONFIG = """
[mesh]
# Over before the long streams are: these go on at the instance that stays.
drain_timeout_s = 2.0
[instance]
engine = "emulated"
block_size = 16
max_decode_batch = 32
[emulation]
prefill_base_s = 0.02
prefill_per_token_s = 0.001
decode_base_s = 0.1
decode_per_sequence_s = 0.002
total_blocks = 1024
"""
PROMPT_TOKENS = 60
LONG_TOKENS, SHORT_TOKENS = 120, 15
"""Twelve seconds and more of decoding, and a second and a half."""
LONG_STREAMS = 6
RATE_PER_S = 3.0
WAIT_S = 30.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("scaling-down") / "mesh"
    with running_mesh(directory, "--decode", "3", config=CONFIG) as mesh:
        yield mesh


def test_scaling_down_under_load_fails_no_request_and_changes_no_token(mesh: Mesh) -> None:
    asyncio.run(scale_down_under_load(mesh))
    assert asyncio.run(mesh.left_over()) == {}
    assert levels_of_the_gone(mesh, 2) == {"info"}


def levels_of_the_gone(mesh: Mesh, instances: int) -> set[str]:
    """Of the lines about that many instances, once the scheduler has missed them for a lease."""
    deadline_s = time.monotonic() + WAIT_S
    while len(gone := mesh.logged("scheduler", "instance_gone")) < instances:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return {line["level"] for line in gone}


async def scale_down_under_load(mesh: Mesh) -> None:
    prompts = [[3 + 100 * number + token for token in range(PROMPT_TOKENS)] for number in range(LONG_STREAMS)]
    async with mesh.client() as client:
        alone = await asyncio.gather(*(say(client, prompt) for prompt in prompts))
        async with Traffic(mesh, RATE_PER_S, PROMPT_TOKENS, SHORT_TOKENS) as traffic:
            begun = [asyncio.Event() for _ in prompts]
            streams = [
                asyncio.create_task(say(client, prompt, event))
                for prompt, event in zip(prompts, begun, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            running = await mesh.metric_by_instance("decode", "lamella_requests_running")
            assert len(running) == 3
            assert all(running.values()), f"each instance has something to lose: {running}"
            said = await asyncio.to_thread(mesh.lamella, "scale", "decode=1")
            assert said.strip() == "decode: 3 → 1 (decode-1, decode-2 drained)"
            assert not all(stream.done() for stream in streams), "there was something to go on with"
            assert await asyncio.gather(*streams) == alone
        assert traffic.failures == []
        assert traffic.served > 0


async def say(client: openai.AsyncOpenAI, prompt: list[int], begun: asyncio.Event | None = None) -> str:
    return await stream_text(client, prompt, LONG_TOKENS, begun or asyncio.Event(), begun_chunks=5)
