"""Attention and model workers that die or pause: streams go on with the tokens they would have had."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh, stream_text

CONFIG = """
[mesh]
lease_s = 8
[instance]
block_size = 16
[transfer]
emulated_latency_s = 0.005
"""
"""Steps of some hundredths of a second, amid which a process can be killed. Leases last longer than a paused
worker may stay unnoticed."""
STREAMS = 4
OUTPUT_TOKENS = 120
"""Some seconds of steps: on a busy machine a client may see a second late what was drawn."""
BEGUN_CHUNKS = 4
"""The first token is prefill's; from the second on the KV lies with the attention workers."""
NOTICED_S = 2.0
"""After this at most a worker that pauses amid a step is given up."""
SCHEDULING_S = 5.0
"""What a busy machine may add."""
WATCH_S = 30.0


@pytest.fixture(
    scope="module",
    params=[
        ("--decode", "2", "--attention", "2", "--partition", "requests"),
        ("--attention", "3", "--partition", "heads", "--pipeline", "rotational", "--batches", "3"),
    ],
    ids=["by requests", "by heads, three batches in rotation"],
)
def mesh(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    """Exact arithmetic, so that a continued sequence draws the same tokens."""
    directory = tmp_path_factory.mktemp("attention") / "mesh"
    options = (*request.param, "--model", str(tiny_model), "--dtype", "fp32")
    with running_mesh(directory, *options, config=CONFIG) as mesh:
        yield mesh


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of some streams: their texts, and how many prompt tokens were computed for them."""

    texts: list[str]
    prompt_tokens: float


async def run_streams(mesh: Mesh, disturb: Callable[[], Awaitable[None]] | None = None) -> Outcome:
    """``disturb`` comes when every stream is being decoded, and none has ended."""
    computed = await mesh.prompt_tokens_computed()
    decoding = [asyncio.Event() for _ in range(STREAMS)]
    async with mesh.client() as client:
        streams = [
            asyncio.create_task(one_stream(client, index, begun)) for index, begun in enumerate(decoding)
        ]
        for begun in decoding:
            await begun.wait()
        if disturb is not None:
            assert not any(stream.done() for stream in streams)
            await disturb()
        texts = await asyncio.gather(*streams)
    return Outcome(texts, await mesh.prompt_tokens_computed() - computed)


@pytest.fixture(scope="module")
def undisturbed(mesh: Mesh) -> Outcome:
    outcome = asyncio.run(run_streams(mesh))
    assert outcome.prompt_tokens == sum(40 + index for index in range(STREAMS))
    return outcome


@pytest.fixture(scope="module")
def kv_blocks(mesh: Mesh) -> float:
    """Of all decode instances' pools, while each has one at every worker."""
    return asyncio.run(mesh.metric("decode", "lamella_kv_blocks"))


async def wait_pools(mesh: Mesh, kv_blocks: float) -> None:
    """Until no worker that began anew is without a pool of anybody: whoever has none there would not notice
    that it is lost."""
    async with asyncio.timeout(WATCH_S):
        while True:
            if await mesh.metric("decode", "lamella_kv_blocks") == kv_blocks:
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_losing_an_attention_worker_changes_no_token(
    mesh: Mesh, kv_blocks: float, undisturbed: Outcome, number: signal.Signals
) -> None:
    asyncio.run(wait_pools(mesh, kv_blocks))
    pid = mesh.pid_of("attention")
    instances = len(mesh.status()["instances"])
    ended = len(mesh.logged("scheduler", "attention_worker_gone"))

    async def disturb() -> None:
        lost = len(mesh.logged("decode", "attention_pool_lost"))
        paused_s = time.time()
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            try:
                await check_noticed(mesh, lost, paused_s)
                await forgotten(mesh, pid)
            finally:
                # Where all heads are needed, it must go on.
                os.kill(pid, signal.SIGCONT)

    assert asyncio.run(run_streams(mesh, disturb)).texts == undisturbed.texts
    asyncio.run(mesh.wait_ready(instances))
    assert asyncio.run(mesh.left_over()) == {}
    told = mesh.logged("scheduler", "attention_worker_gone")[ended:]
    assert len(told) == (number == signal.SIGKILL), "who hangs has not ended"


async def check_noticed(mesh: Mesh, lost: int, paused_s: float) -> None:
    """The decode instance gives the paused worker up for its silence, not its lease's end, and in time."""
    async with asyncio.timeout(WATCH_S):
        while True:
            losses = mesh.logged("decode", "attention_pool_lost")[lost:]
            if losses:
                break
            await asyncio.sleep(0.01)
    assert "has not answered" in losses[0]["error"]
    noticed_s = datetime.fromisoformat(losses[0]["time"]).timestamp() - paused_s
    assert noticed_s <= NOTICED_S + SCHEDULING_S


async def forgotten(mesh: Mesh, pid: int) -> None:
    """Until the worker's lease has ended."""
    async with asyncio.timeout(WATCH_S):
        while True:
            if all(each.pid != pid for each in await mesh.members()):
                return
            await asyncio.sleep(0.1)


def test_a_killed_model_worker_costs_no_token_and_no_kv(mesh: Mesh, undisturbed: Outcome) -> None:
    """Another decode instance goes on with its KV, or its own next life."""
    pid = mesh.pid_of("decode")
    instances = len(mesh.status()["instances"])

    async def disturb() -> None:
        os.kill(pid, signal.SIGKILL)

    assert asyncio.run(run_streams(mesh, disturb)) == undisturbed
    asyncio.run(mesh.wait_ready(instances))
    assert asyncio.run(mesh.left_over()) == {}


def test_attention_workers_come_and_go_under_running_streams(mesh: Mesh, undisturbed: Outcome) -> None:
    if len([each for each in mesh.status()["processes"] if each["role"] == "attention"]) == 3:
        with pytest.raises(AssertionError, match="--partition requests"):
            mesh.lamella("scale", "attention=1")
        return

    async def disturb() -> None:
        for count in (3, 1):
            await asyncio.to_thread(mesh.lamella, "scale", f"attention={count}")

    assert asyncio.run(run_streams(mesh, disturb)).texts == undisturbed.texts
    assert asyncio.run(mesh.left_over()) == {}


async def one_stream(client: openai.AsyncOpenAI, index: int, begun: asyncio.Event) -> str:
    """Its text. ``begun`` is set once it is being decoded."""
    return await stream_text(client, list(range(100, 140 + index)), OUTPUT_TOKENS, begun, BEGUN_CHUNKS)
