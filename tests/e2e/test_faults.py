"""Clients that leave and processes that die: streams go on with the tokens they would have had."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from tests.e2e.meshes import Mesh, running_mesh

LEASE_S = 3.0
CONFIG = f"""
[mesh]
heartbeat_s = {LEASE_S / 2}
lease_s = {LEASE_S}
call_timeout_s = 15
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.01
prefill_base_s = 0.05
total_blocks = 256
"""
STREAMS = 8
OUTPUT_TOKENS = 150
NOTICED_WITHIN_S = 20.0
HANG_S = LEASE_S + 0.5
"""Of NATS: from four seconds on who is connected counts its pings that nobody answered, and connects anew."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("faults") / "mesh"
    with running_mesh(directory, "--prefill", "2", "--decode", "2", config=CONFIG) as mesh:
        yield mesh


def test_where_a_request_went_is_explained_by_the_id_of_its_answer(mesh: Mesh) -> None:
    began_s = time.time()
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="default", prompt="Why here?", max_tokens=5, n=2, extra_body={"ignore_eos": True}
        )
    decisions = json.loads(mesh.lamella("explain", answer.id, "--json"))
    assert [each["output_tokens"] for each in decisions] == [5, 5]
    for decision in decisions:
        assert began_s <= decision["at_s"] <= time.time()
        prefill, decode = decision["choices"]
        assert (prefill["policy"], decode["policy"]) == ("shortest_queue", "least_loaded")
        for choice in (prefill, decode):
            best = min(choice["candidates"], key=lambda each: (each["score"], each["instance_id"]))
            assert choice["taken"] == best["instance_id"]
            assert len(choice["candidates"]) == 2
    assert "taken" in mesh.lamella("explain", answer.id)
    with pytest.raises(AssertionError, match="no scheduler remembers cmpl-0"):
        mesh.lamella("explain", "cmpl-0")
    with pytest.raises(AssertionError, match="remembers any request of class batch for which decode-9 was"):
        mesh.lamella("explain", "--class", "batch", "--instance", "decode-9")
    with pytest.raises(AssertionError, match="leave the counts away"):
        mesh.lamella("scale", "decode=1", "--show")


def test_whose_client_left_is_explained_as_over(mesh: Mesh) -> None:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="default", prompt="Stay.", max_tokens=2000, stream=True)
        first = next(iter(stream))
        assert "not over yet" in mesh.lamella("explain", first.id)
        stream.close()
    deadline_s = time.monotonic() + NOTICED_WITHIN_S
    while "over before its own end" not in mesh.lamella("explain", first.id):
        assert time.monotonic() < deadline_s, "nobody noticed that it has ended"


def test_clients_that_leave_in_any_phase_leave_nothing_behind(mesh: Mesh) -> None:
    async def leave_after(client: openai.AsyncOpenAI, delay_s: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(delay_s):
                await one_stream(client, seed=1)

    async def all_leave() -> None:
        async with mesh.client() as client:
            await asyncio.gather(*(leave_after(client, 0.02 * step) for step in range(1, 40)))

    asyncio.run(all_leave())
    assert asyncio.run(mesh.left_over()) == {}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_killing_an_instance_changes_no_token(mesh: Mesh, role: str) -> None:
    killed = mesh.pid_of(role)

    async def run(kill: bool) -> list[str]:
        async with mesh.client() as client:
            streams = [asyncio.create_task(one_stream(client, seed)) for seed in range(STREAMS)]
            await asyncio.sleep(0.4)
            if kill:
                os.kill(killed, signal.SIGKILL)
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(run(kill=False))
    before = mesh.logged("scheduler", "process_ended")
    assert asyncio.run(run(kill=True)) == undisturbed
    assert asyncio.run(mesh.left_over()) == {}
    [ended] = mesh.logged("scheduler", "process_ended")[len(before) :]
    assert ended["member"].startswith(role), "its silence alone told of it"


def test_a_prefill_instance_that_hangs_costs_time_and_no_stream(mesh: Mesh) -> None:
    """It is declared gone while calls to it are still under way."""

    async def run() -> list[str]:
        async with mesh.client() as client:
            streams = [asyncio.create_task(one_stream(client, seed)) for seed in range(STREAMS)]
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(run())
    with paused(mesh.pid_of("prefill")):
        assert asyncio.run(run()) == undisturbed
    assert asyncio.run(mesh.left_over()) == {}


def test_a_nats_that_hangs_for_a_lease_makes_nobody_gone(mesh: Mesh) -> None:
    nats = mesh.pid_of("nats")

    async def run(pause_s: float) -> list[str]:
        async with mesh.client() as client:
            streams = [asyncio.create_task(one_stream(client, seed)) for seed in range(STREAMS)]
            await asyncio.sleep(0.4)
            if pause_s:
                with paused(nats):
                    await asyncio.sleep(pause_s)
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(run(pause_s=0))
    before = mesh.log("scheduler").count("instance_gone")
    assert asyncio.run(run(pause_s=HANG_S)) == undisturbed
    assert mesh.log("scheduler").count("instance_gone") == before
    assert asyncio.run(mesh.left_over()) == {}


def test_scaling_down_under_load_loses_no_stream(mesh: Mesh) -> None:
    async def run() -> list[str]:
        async with mesh.client() as client:
            streams = [asyncio.create_task(one_stream(client, seed)) for seed in range(STREAMS)]
            await asyncio.sleep(0.3)
            await asyncio.to_thread(mesh.lamella, "scale", "decode=1", "prefill=1")
            return await asyncio.gather(*streams)

    async def undisturbed() -> list[str]:
        async with mesh.client() as client:
            return await asyncio.gather(*(one_stream(client, seed) for seed in range(STREAMS)))

    expected = asyncio.run(undisturbed())
    assert asyncio.run(run()) == expected
    assert sorted(str(each["role"]) for each in mesh.status()["instances"]) == ["decode", "prefill"]
    assert asyncio.run(mesh.left_over()) == {}


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def one_stream(client: openai.AsyncOpenAI, seed: int) -> str:
    stream = await client.completions.create(
        model="default",
        prompt=list(range(100, 140 + seed)),
        max_tokens=OUTPUT_TOKENS,
        seed=seed,
        stream=True,
        timeout=60,
    )
    return "".join([chunk.choices[0].text async for chunk in stream])
