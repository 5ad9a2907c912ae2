"""Several schedulers: the leader dies or hangs, another leads, and requests are placed all along."""

import asyncio
import datetime
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from common.errors import LeaderSuperseded
from common.ids import InstanceId
from common.messages import FlipProgress, FlipRole, ServiceRecord
from common.store import Leader
from tests.e2e.meshes import Mesh, get_text, running_mesh, stream_text

CONFIG = """
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.005
prefill_base_s = 0.01
total_blocks = 512
"""
FAILOVER_S = 10.0
"""Of which two are the lease that is the default, and the others what a busy machine may add."""
WAIT_S = 30.0
POLL_S = 0.02
CLIENTS = 4
OUTPUT_TOKENS = 40
PROMPT, LONG_OUTPUT_TOKENS = list(range(100, 177)), 900


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("schedulers") / "mesh"
    with running_mesh(directory, "--schedulers", "2", config=CONFIG) as mesh:
        yield mesh


def test_a_leader_that_is_killed_is_followed_and_every_request_is_served(mesh: Mesh) -> None:
    async def work() -> None:
        before = await leader_of(mesh)
        async with load(mesh) as texts:
            await until_more(texts)
            pid = mesh.pid_of(before.service_id)
            killed_unix_s = time.time()
            os.kill(pid, signal.SIGKILL)
            after = await leader_of(mesh, before.epoch)
            await until_more(texts)
        assert failover_s(mesh, after, killed_unix_s) <= FAILOVER_S
        # All were alike, so one that lost a token or had one twice would differ.
        assert len(set(texts)) == 1
        status = json.loads(mesh.lamella("status", "--json"))
        assert status["leader"] == {"id": after.service_id, "epoch": after.epoch}
        assert "leads" in mesh.lamella("status")

    asyncio.run(work())
    asyncio.run(mesh.wait_ready(2))
    assert asyncio.run(mesh.left_over()) == {}


def test_a_leader_that_hung_and_wakes_commands_nobody(mesh: Mesh) -> None:
    async def work() -> None:
        before = await leader_of(mesh)
        pid = mesh.pid_of(before.service_id)
        async with load(mesh) as texts:
            await until_more(texts)
            os.kill(pid, signal.SIGSTOP)
            try:
                after = await leader_of(mesh, before.epoch)
                # Instances have heard of it: what the old one was about to send comes too late.
                with pytest.raises(LeaderSuperseded):
                    await flip_with(mesh, before.epoch)
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_more(texts)
        assert len(set(texts)) == 1
        assert (await epochs_of(mesh))[after.service_id] == after.epoch
        assert await epoch_once_back(mesh, before.service_id) == 0
        assert (await leader_of(mesh)).epoch == after.epoch

    asyncio.run(work())
    assert asyncio.run(mesh.left_over()) == {}


def test_schedulers_that_all_died_begin_anew_with_what_they_had_booked(mesh: Mesh) -> None:
    async def work() -> None:
        lives = {name: len(bookings_read(mesh, name)) for name in await epochs_of(mesh)}
        pids = [mesh.pid_of(name) for name in lives]
        async with mesh.client() as client:
            begun = [asyncio.Event() for _ in range(CLIENTS)]
            streams = [
                asyncio.create_task(stream_text(client, PROMPT, LONG_OUTPUT_TOKENS, each)) for each in begun
            ]
            await asyncio.gather(*(each.wait() for each in begun))
            await until_booked_in_the_store(mesh)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await until_begun_anew(mesh, lives)
            assert min(bookings_read(mesh, name)[-1] for name in lives) >= CLIENTS
            assert len(set(await asyncio.gather(*streams))) == 1

    asyncio.run(work())
    asyncio.run(mesh.wait_ready(2))
    assert asyncio.run(mesh.left_over()) == {}


def test_decisions_of_all_schedulers_are_found(mesh: Mesh) -> None:
    async def work() -> list[str]:
        async with mesh.client() as client:
            # So many that each scheduler has some: who takes a call is drawn.
            answers = await asyncio.gather(*(ask_one(client) for _ in range(16)))
        return [each.id for each in answers]

    ids = asyncio.run(work())
    for each in ids[:8]:
        assert len(json.loads(mesh.lamella("explain", each, "--json"))) == 1
    told = mesh.lamella("explain", "--newest", "16", "--exact").splitlines()
    exact = [line for line in told if ": exact: after the newest" in line]
    assert [line.partition(":")[0] for line in exact] == ["scheduler-0", "scheduler-1"]
    newest = json.loads(mesh.lamella("explain", "--newest", "16", "--json"))
    assert {each["request_id"] for each in newest} == {each.split("-", 1)[1] for each in ids}


@asynccontextmanager
async def load(mesh: Mesh) -> AsyncIterator[list[str]]:
    """Clients that ask one after another for the same text, all along; what they were answered."""
    texts: list[str] = []
    is_over = asyncio.Event()

    async def ask(client: openai.AsyncOpenAI) -> None:
        while not is_over.is_set():
            texts.append(await complete(client))

    async with mesh.client() as client, asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(ask(client))
        yield texts
        is_over.set()


async def epoch_once_back(mesh: Mesh, scheduler: str) -> float:
    """What it says itself as soon as it is a member again: its lease may have ended."""
    async with asyncio.timeout(WAIT_S):
        while True:
            epoch = (await epochs_of(mesh)).get(scheduler)
            if epoch is not None:
                return epoch
            await asyncio.sleep(POLL_S)


async def until_more(texts: list[str]) -> None:
    """Until as many more have been answered as clients ask."""
    wanted = len(texts) + 2 * CLIENTS
    async with asyncio.timeout(WAIT_S):
        while True:
            if len(texts) >= wanted:
                return
            await asyncio.sleep(POLL_S)


async def complete(client: openai.AsyncOpenAI) -> str:
    answer = await ask_one(client)
    return answer.choices[0].text


async def ask_one(client: openai.AsyncOpenAI) -> openai.types.Completion:
    return await client.completions.create(
        model="default",
        prompt=list(range(100, 140)),
        max_tokens=OUTPUT_TOKENS,
        seed=7,
        extra_body={"ignore_eos": True},
        timeout=WAIT_S,
    )


async def until_booked_in_the_store(mesh: Mesh) -> None:
    """All that have that prompt, delivered."""
    async with mesh.store() as store, asyncio.timeout(WAIT_S):
        while True:
            booked = [each.booked for each in await store.bookings() if each.booked is not None]
            if sum(each.is_acknowledged and each.prompt_tokens == len(PROMPT) for each in booked) == CLIENTS:
                return
            await asyncio.sleep(POLL_S)


async def until_begun_anew(mesh: Mesh, lives: dict[str, int]) -> None:
    """Until each of those schedulers has read the store more often than so."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if all(len(bookings_read(mesh, name)) > count for name, count in lives.items()):
                return
            await asyncio.sleep(POLL_S)


def bookings_read(mesh: Mesh, scheduler: str) -> list[int]:
    """How many each life of that scheduler has found in the store."""
    found = [each for each in logged(mesh, scheduler, "bookings_read") if each["scheduler"] == "store"]
    return [each["bookings"] for each in found]


async def leader_of(mesh: Mesh, after_epoch: int = 0) -> Leader:
    """Once somebody leads with a higher epoch than that."""
    async with asyncio.timeout(WAIT_S):
        while True:
            leader = await read_leader(mesh)
            if leader is not None and leader.epoch > after_epoch:
                return leader
            await asyncio.sleep(POLL_S)


async def read_leader(mesh: Mesh) -> Leader | None:
    async with mesh.store() as store:
        return await store.leader()


async def flip_with(mesh: Mesh, epoch: int) -> FlipProgress:
    calls = mesh.subjects.instance_calls(InstanceId("decode-0"))
    async with mesh.bus() as bus:
        return await bus.call(calls, FlipRole("decode", epoch), FlipProgress, 5.0)


async def epochs_of(mesh: Mesh) -> dict[str, float]:
    """By scheduler, as it says itself; 0: it does not lead."""
    epochs = {}
    for each in await mesh.members():
        if isinstance(each, ServiceRecord) and each.kind == "scheduler":
            metrics = get_text(f"{each.http_url}/metrics")
            found = re.search(r"^lamella_leader_epoch (\S+)$", metrics, re.MULTILINE)
            assert found is not None
            epochs[each.service_id] = float(found[1])
    return epochs


def failover_s(mesh: Mesh, leader: Leader, since_unix_s: float) -> float:
    """Until it led, as it logged."""
    [led] = [each for each in logged(mesh, leader.service_id, "leads") if each["epoch"] == leader.epoch]
    return datetime.datetime.fromisoformat(led["time"]).timestamp() - since_unix_s


def logged(mesh: Mesh, service_id: str, event: str) -> list[dict[str, Any]]:
    lines = (mesh.state_dir / "logs" / f"{service_id}.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [each for each in events if each["event"] == event]
