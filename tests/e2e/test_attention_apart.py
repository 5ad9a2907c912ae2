"""An attention worker on another host than its decode instance, whose kernel tells of no end there, dies: it
is known at once, not once its answer is overdue."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.meshes import Mesh, running_mesh, stream_text

CONFIG = """
[instance]
block_size = 16
[transfer]
path = "mooncake"
emulated_latency_s = 0.005
"""
STREAMS = 3
OUTPUT_TOKENS = 60
BEGUN_CHUNKS = 4


@pytest.fixture(scope="module")
def mesh(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("apart") / "mesh"
    options = ("--attention", "2", "--partition", "requests", "--model", str(tiny_model), "--dtype", "fp32")
    with running_mesh(directory, *options, config=CONFIG, is_apart=True) as mesh:
        yield mesh


async def texts_of(mesh: Mesh, killed: int | None) -> list[str]:
    """``killed``: once every stream is decoded."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    async with mesh.client() as client:
        streams = [
            asyncio.create_task(
                stream_text(client, list(range(7, 47 + index)), OUTPUT_TOKENS, event, BEGUN_CHUNKS)
            )
            for index, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
        return await asyncio.gather(*streams)


def test_streams_go_on_as_soon_as_schedulers_have_seen_its_end(mesh: Mesh) -> None:
    undisturbed = asyncio.run(texts_of(mesh, None))
    assert asyncio.run(texts_of(mesh, mesh.pid_of("attention"))) == undisturbed
    [gone] = mesh.logged("scheduler", "attention_worker_gone")
    [lost] = mesh.logged("decode", "attention_pool_lost")
    assert lost["error"] == f"attention worker {gone['worker']}: its process has ended"
    asyncio.run(mesh.wait_ready(len(mesh.status()["instances"])))
    assert asyncio.run(mesh.left_over()) == {}
