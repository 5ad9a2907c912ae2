"""A server that answers completions by a rule, over a real socket, on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class AskedWith:
    prompt: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(slots=True)
class Target:
    """``length_of`` says what a prompt draws; 0: it is refused. The first ``full_times`` requests find it
    full, and every one a ``status`` other than 200 where that is set."""

    length_of: Callable[[list[int]], int]
    full_times: int = 0
    status: int = 200
    asked: list[list[int]] = field(default_factory=list)
    asked_with: list[AskedWith] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["prompt"])
        self.asked_with.append(AskedWith(tuple(body["prompt"]), body["temperature"], body["seed"]))
        if self.full_times:
            self.full_times -= 1
            return web.json_response({"error": {}}, status=503, headers={"retry-after": "0"})
        length = self.length_of(body["prompt"])
        if not length or self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=400 if not length else self.status)
        is_cut = length >= body["max_tokens"]
        return web.json_response(
            {
                "choices": [{"text": "", "finish_reason": "length" if is_cut else "stop"}],
                "usage": {"completion_tokens": min(length, body["max_tokens"])},
            }
        )


@contextmanager
def serving(target: Target) -> Iterator[Target]:
    """Listens when this returns."""
    loop, listens = asyncio.new_event_loop(), threading.Event()

    async def listen() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", target.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(listen())
        listens.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert listens.wait(START_TIMEOUT_S)
    try:
        yield target
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
