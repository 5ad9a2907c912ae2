"""Running streams move between attention workers, and keep their tokens whatever dies meanwhile."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.messages import ServiceRecord
from tests.e2e.meshes import Mesh, get_text, running_mesh

CONFIG = """
[mesh]
lease_s = 5
[instance]
block_size = 16
attention_move_gain_tokens = 1
[transfer]
emulated_bandwidth_bytes_per_s = 1e6
emulated_latency_s = 0.01
"""
"""Steps and moves of tenths of a second, in which a worker can be killed."""
STREAMS = 4
MAX_TOKENS = 1900
BEGUN_CHUNKS = 4
"""The first token is prefill's; from the second on the KV lies with the attention workers."""
LAST_CHUNKS = 12
"""After whatever was done."""
HELD_BACK_TOKENS = 32
"""Of a stream that has not ended, at most."""
WATCH_S = 60.0


@pytest.fixture(scope="module")
def local(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh that attends where it decodes."""
    directory = tmp_path_factory.mktemp("local") / "mesh"
    with running_mesh(directory, "--model", str(tiny_model), "--dtype", "fp32") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Exact arithmetic, so that a continued sequence draws the same tokens."""
    directory = tmp_path_factory.mktemp("moves") / "mesh"
    options = ("--attention", "1", "--partition", "requests", "--dtype", "fp32")
    with running_mesh(directory, "--model", str(tiny_model), *options, config=CONFIG) as mesh:
        yield mesh


def test_streams_spread_over_a_worker_that_comes_and_leave_one_that_goes(mesh: Mesh, local: Mesh) -> None:
    """The worker that goes does so before they end, and nothing is prefilled again."""

    async def disturb() -> None:
        await scale(mesh, 2)
        await seen(mesh, "kv_moved", 2)
        await shown(mesh, lambda workers: len(workers) == 2 and all(each["running"] for each in workers))
        await scale(mesh, 1)
        await seen(mesh, "attention_pool_left", 1)

    computed = asyncio.run(mesh.prompt_tokens_computed())
    check(local, asyncio.run(run_streams(mesh, disturb)))
    assert count(mesh, "kv_moved") >= 4
    assert asyncio.run(mesh.prompt_tokens_computed()) - computed == sum(40 + each for each in range(STREAMS))
    assert asyncio.run(mesh.left_over()) == {}


@pytest.mark.parametrize(
    ("worker", "number"),
    [("attention-0", signal.SIGKILL), ("attention-1", signal.SIGKILL), ("attention-1", signal.SIGSTOP)],
    ids=["source killed", "destination killed", "destination paused"],
)
def test_a_worker_lost_amid_a_move_changes_no_token(
    mesh: Mesh, local: Mesh, worker: str, number: signal.Signals
) -> None:
    before = {event: count(mesh, event) for event in ("move_began", "move_failed", "attention_pool_lost")}

    async def disturb() -> None:
        scaling = asyncio.create_task(scale(mesh, 2))
        await seen(mesh, "move_began", before["move_began"] + 1)
        pid = await pid_of(mesh, worker)
        os.kill(pid, number)
        await seen(mesh, "move_failed", before["move_failed"] + 1)
        if number == signal.SIGSTOP:
            await seen(mesh, "attention_pool_lost", before["attention_pool_lost"] + 1)
            os.kill(pid, signal.SIGCONT)
        await scaling

    check(local, asyncio.run(run_streams(mesh, disturb)))
    asyncio.run(scale(mesh, 1))
    assert asyncio.run(mesh.left_over()) == {}


def test_a_model_worker_killed_after_moves_goes_on_where_its_sequences_are_now(
    mesh: Mesh, local: Mesh
) -> None:
    """Its next life finds all of their KV: what has come is known, and what is on its way is still there."""
    before = {event: count(mesh, event) for event in ("kv_moved", "kv_inherited")}

    async def disturb() -> None:
        await scale(mesh, 2)
        await seen(mesh, "kv_moved", before["kv_moved"] + 2)
        os.kill(mesh.pid_of("decode"), signal.SIGKILL)
        await seen(mesh, "kv_inherited", before["kv_inherited"] + STREAMS)

    computed = asyncio.run(mesh.prompt_tokens_computed())
    check(local, asyncio.run(run_streams(mesh, disturb)))
    assert asyncio.run(mesh.prompt_tokens_computed()) - computed == sum(40 + each for each in range(STREAMS))
    asyncio.run(scale(mesh, 1))
    assert asyncio.run(mesh.left_over()) == {}


def check(local: Mesh, streams: list[list[str]]) -> None:
    """As far as they go, which is not to the end."""
    assert all(len(chunks) < MAX_TOKENS // 2 for chunks in streams), "a stream ended meanwhile"
    tokens = max(map(len, streams)) + HELD_BACK_TOKENS
    for chunks, whole in zip(streams, asyncio.run(run_streams(local, None, tokens)), strict=True):
        assert "".join(whole).startswith("".join(chunks))


async def run_streams(
    mesh: Mesh, disturb: Callable[[], Awaitable[None]] | None, max_tokens: int = MAX_TOKENS
) -> list[list[str]]:
    """Their chunks, to the end. ``disturb`` comes when every stream is being decoded; where there is one, the
    streams go on for a while after it and are then left."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    disturbed = asyncio.Event()
    async with mesh.client() as client:
        streams = [
            asyncio.create_task(one_stream(client, index, max_tokens, each, disturbed))
            for index, each in enumerate(begun)
        ]
        if disturb is not None:
            for each in begun:
                await each.wait()
            await disturb()
            disturbed.set()
        return await asyncio.gather(*streams)


async def one_stream(
    client: openai.AsyncOpenAI, index: int, max_tokens: int, begun: asyncio.Event, disturbed: asyncio.Event
) -> list[str]:
    """Sampled from a few, so that other logits are soon another token, and rounding is not."""
    stream = await client.completions.create(
        model="default",
        prompt=list(range(100, 140 + index)),
        max_tokens=max_tokens,
        temperature=1.0,
        seed=index,
        stream=True,
        timeout=240,
        extra_body={"ignore_eos": True, "top_k": 8},
    )
    texts: list[str] = []
    last = 0
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if len(texts) == BEGUN_CHUNKS:
            begun.set()
        last += disturbed.is_set()
        if last == LAST_CHUNKS:
            await stream.close()
            break
    return texts


async def scale(mesh: Mesh, workers: int) -> None:
    await asyncio.to_thread(mesh.lamella, "scale", f"attention={workers}")


def count(mesh: Mesh, event: str) -> int:
    """How often the decode instance has logged it."""
    return mesh.log("decode").count(f'"event":"{event}"')


async def seen(mesh: Mesh, event: str, times: int) -> None:
    async with asyncio.timeout(WATCH_S):
        while True:
            if count(mesh, event) >= times:
                return
            await asyncio.sleep(0.01)


async def shown(mesh: Mesh, is_so: Callable[[list[dict[str, Any]]], bool]) -> None:
    """On the private port, of the attention workers."""
    url = f"{mesh.status()['private_url']}/api/mesh"
    async with asyncio.timeout(WATCH_S):
        while True:
            services = json.loads(await asyncio.to_thread(get_text, url))["services"]
            if is_so([each for each in services if each["kind"] == "attention"]):
                return
            await asyncio.sleep(0.1)


async def pid_of(mesh: Mesh, worker: str) -> int:
    members = await mesh.members()
    return next(each.pid for each in members if isinstance(each, ServiceRecord) and each.service_id == worker)
