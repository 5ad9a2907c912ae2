"""Requests of the official client, for tests that speak for the rest of the mesh."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import openai

from common.messages import GenerationRequest
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import ScriptedPeer, scripted_peer

TEXT = "The quick brown fox jumps over the lazy dog."
Script = Callable[[ScriptedPeer], Awaitable[None]]
StreamScript = Callable[[ScriptedPeer, GenerationRequest], Awaitable[None]]
PROMPT: dict[str, Any] = {"model": "default", "prompt": [10, 11, 12], "max_tokens": 100}


@asynccontextmanager
async def client_of(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as client:
        yield client


async def complete(gateway: GatewayProcess, **options: Any) -> str:
    """The streamed text of one completion."""
    async with client_of(gateway) as client:
        stream = await client.completions.create(**{**PROMPT, **options}, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


def with_peer(gateway: GatewayProcess, script: Script) -> None:
    """Runs ``script(peer)``; afterwards no request may be open."""

    async def run() -> None:
        async with scripted_peer(gateway) as peer:
            await script(peer)

    asyncio.run(run())
    gateway.wait_metric("lamella_open_requests", 0)


def in_background(work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    """A client whose call fails says so at once: a test that waits for its submission would only say that
    none came."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_print_failure)
    return task


def _print_failure(task: asyncio.Task[str]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)


def with_stream(
    gateway: GatewayProcess, script: StreamScript, *, is_held: bool = False, **options: Any
) -> None:
    """Runs ``script(peer, request)`` beside a client whose completion that request is, and which must be
    answered ``TEXT``; no other submission may be left. ``is_held``: the script is to set the peer's gate
    before anybody's submission is answered."""

    async def run(peer: ScriptedPeer) -> None:
        if is_held:
            peer.gate.clear()
        answer = in_background(complete(gateway, **options))
        await script(peer, await peer.next_request())
        assert await answer == TEXT
        assert peer.submissions.empty()

    with_peer(gateway, run)


async def whole(gateway: GatewayProcess, **options: Any) -> str:
    """The text of one completion that is not streamed."""
    async with client_of(gateway) as client:
        answer = await client.completions.create(**{**PROMPT, **options})
    return str(answer.choices[0].text)
