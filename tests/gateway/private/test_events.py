"""The private port's stream of events: what it brings, and when."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from common.ids import Incarnation
from common.messages import ServiceRecord
from common.store import Store
from tests.gateway.clients import complete, in_background, with_peer
from tests.gateway.private.conftest import get, private_url_of
from tests.gateway.processes import GatewayProcess
from tests.gateway.scripted import ScriptedPeer


def test_events_bring_the_same_every_second(gateway: GatewayProcess) -> None:
    url = private_url_of(gateway)
    names: list[str] = []
    with urllib.request.urlopen(f"{url}/api/events", timeout=10) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        while names.count("latency") < 2:
            line = stream.readline().decode()
            name, _, content = line.partition(": ")
            if name == "event":
                names.append(content.strip())
            elif name == "data":
                shown, fetched = json.loads(content), get(f"{url}/api/{names[-1]}")
                assert set(shown) == set(fetched)
    assert set(names) == {"mesh", "latency", "requests"}


def events_of(url: str, query: str = "") -> Iterator[tuple[str, Any]]:
    """Name and content of each, as they come."""
    name = ""
    with urllib.request.urlopen(f"{url}/api/events{query}", timeout=10) as stream:
        for line in stream:
            field, _, content = line.decode().strip().partition(": ")
            if field == "event":
                name = content
            elif field == "data":
                yield name, json.loads(content)


def test_events_bring_the_timeline_of_the_request_that_is_asked_for_to_its_end(
    gateway: GatewayProcess,
) -> None:
    url = private_url_of(gateway)

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        events = events_of(url, f"?request=cmpl-{request.request_id}")

        def next_timeline() -> Any:
            return next(content for name, content in events if name == "timeline")

        peer.tokens(request, [11])
        while (await asyncio.to_thread(next_timeline))["request"]["output_tokens"] == 0:
            pass
        peer.tokens(request, [12], start=1, finish="length")
        await answer
        while (last := await asyncio.to_thread(next_timeline))["request"]["phase"] != "finished":
            pass
        assert last == await asyncio.to_thread(get, f"{url}/api/requests/{request.request_id}")
        # It stands still: in as many turns as two seconds have, nothing more of it comes.
        rest = [await asyncio.to_thread(next, events) for _ in range(5)]
        assert {name for name, _ in rest} <= {"mesh", "latency", "requests"}

    with_peer(gateway, script)
    assert next(content for name, content in events_of(url, "?request=none") if name == "timeline") is None


def test_events_bring_the_schedulers_decisions_when_they_change(gateway: GatewayProcess) -> None:
    url = private_url_of(gateway)
    decided = [{"request_id": "r1", "at_s": 1.0}]

    async def decisions(request: web.Request) -> web.Response:
        return web.json_response(decided)

    async def watch() -> None:
        async with scheduler_that(gateway, decisions):
            events = events_of(url)

            def next_decisions() -> Any:
                return next(content for name, content in events if name == "decisions")

            assert await asyncio.to_thread(next_decisions) == [{"request_id": "r1", "at_s": 1.0}]
            decided.insert(0, {"request_id": "r2", "at_s": 2.0})
            assert [each["request_id"] for each in await asyncio.to_thread(next_decisions)] == ["r2", "r1"]

    asyncio.run(watch())


@asynccontextmanager
async def scheduler_that(
    gateway: GatewayProcess, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[None]:
    """One that is registered, and answers so at ``/decisions``."""
    app = web.Application()
    app.router.add_get("/decisions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    mesh = gateway.config.mesh
    store = Store(mesh.redis_url, mesh.namespace)
    record = ServiceRecord(
        service_id="scheduler-9",
        incarnation=Incarnation("s9"),
        kind="scheduler",
        host=host,
        pid=1,
        http_url=f"http://{host}:{port}",
    )
    try:
        await store.join(record, lease_s=60.0)
        yield
        await store.leave()
    finally:
        await store.close()
        await runner.cleanup()
