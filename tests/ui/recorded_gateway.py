"""A gateway that shows what it is given: states of a mesh that a test cannot bring about at will.

It serves the page and the private port's JSON, made of the same Structs, and can fall silent or break off.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from common.listening import bind, port_of
from gateway.private.latency_view import LatencyView
from gateway.private.mesh_view import MeshView
from gateway.private.server import STATIC
from gateway.request_views import RequestList, RequestTimeline
from scheduler.decision_log import Decision

ADMIN_KEY = "recorded-admin-key"
EVENT_S = 0.2
EVENTS = ("mesh", "latency", "requests", "decisions")


@dataclass(frozen=True, slots=True)
class Shown:
    """What every address answers."""

    mesh: MeshView
    latency: LatencyView
    requests: RequestList
    timelines: tuple[RequestTimeline, ...] = ()
    decisions: tuple[Decision, ...] = ()
    chat: tuple[str, ...] = ()


@dataclass(slots=True)
class RecordedGateway:
    """``state`` "silent" keeps streams open and says nothing; "away" breaks them off and refuses new ones.
    ``is_chat_endless``: an answer stays open after its last piece. ``refusal``: of whatever is wished;
    ``wishes``: what was asked of it, by path and body."""

    shown: Shown
    url: str = ""
    state: str = "well"
    is_chat_endless: bool = False
    refusal: str | None = None
    wishes: list[tuple[str, Any]] = field(default_factory=list)

    def show(self, **changed: Any) -> None:
        self.shown = replace(self.shown, **changed)

    def routes(self) -> list[Route | Mount]:
        def answer(name: str) -> Route:
            async def respond(request: Request) -> Response:
                return _json(getattr(self.shown, name))

            return Route(f"/api/{name}", respond)

        return [
            *(answer(name) for name in ("mesh", "latency", "requests", "decisions")),
            Route("/api/requests/{name}", self._timeline),
            Route("/api/events", self._events),
            Route("/api/{wish}", self._wish, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Mount("/ui", StaticFiles(directory=STATIC, html=True)),
        ]

    async def _timeline(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self._find(name)
        return _refusal(404, f"no request {name}") if found is None else _json(found)

    def _find(self, name: str) -> RequestTimeline | None:
        return next((each for each in self.shown.timelines if each.request.id == name), None)

    async def _wish(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {ADMIN_KEY}":
            return _refusal(401, "another admin key is needed")
        wish = request.path_params["wish"]
        if self.refusal is not None:
            return _refusal(409, self.refusal)
        self.wishes.append((wish, await request.json()))
        return Response(b"{}", 202, media_type="application/json")

    async def _events(self, request: Request) -> Response:
        if self.state == "away":
            return _refusal(503, "away")
        return StreamingResponse(self._told(request), media_type="text/event-stream")

    async def _told(self, request: Request) -> AsyncIterator[bytes]:
        asked = request.query_params.get("request")
        while self.state != "away" and not await request.is_disconnected():
            if self.state == "well":
                told = {name: getattr(self.shown, name) for name in EVENTS}
                if asked is not None:
                    told["timeline"] = self._find(asked)
                for name, content in told.items():
                    yield b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))
            await asyncio.sleep(EVENT_S)

    async def _chat(self, request: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            for text in self.shown.chat:
                yield b"data: %b\n\n" % msgspec.json.encode({"choices": [{"delta": {"content": text}}]})
            while self.is_chat_endless and self.state != "away" and not await request.is_disconnected():
                yield b": more may come\n\n"
                await asyncio.sleep(EVENT_S)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@contextmanager
def running_recorded_gateway(shown: Shown) -> Iterator[RecordedGateway]:
    """One that listens, in a thread of its own, until this ends."""
    gateway = RecordedGateway(shown)
    listener = bind("127.0.0.1", 0)
    gateway.url = f"http://127.0.0.1:{port_of(listener)}"
    app = Starlette(routes=gateway.routes())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield gateway
    finally:
        gateway.state = "away"
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    return Response(
        msgspec.json.encode({"error": {"message": message}}), status, media_type="application/json"
    )
