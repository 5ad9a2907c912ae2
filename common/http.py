"""The HTTP side of every process: liveness, readiness, metrics, and a server on a socket we bound.

The socket is bound before the service registers, so port 0 works and the record holds the real port. Signals
are the service's own business, not the server's.
"""

import contextlib
import socket
from asyncio import Event, Protocol
from collections.abc import Callable, Generator

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from common.listening import BACKLOG

HTTP_STOP_TIMEOUT_S = 2
"""How long open connections may last after the drain, which is where requests are waited for."""
READ = ["GET", "HEAD"]

Check = Callable[[], str | None]
"""Why the process is not ready, or None."""


class Health:
    """Named checks; a process is ready when none of them has a reason."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def add(self, name: str, check: Check) -> None:
        self._checks[name] = check

    def reasons(self) -> dict[str, str]:
        found = {name: check() for name, check in self._checks.items()}
        return {name: reason for name, reason in found.items() if reason is not None}


def service_app(health: Health, metrics: Collector) -> FastAPI:
    """``/health/live`` (the loop turns), ``/health/ready`` and ``/health`` (503 and reasons until ready),
    ``/metrics``."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.api_route("/health/live", methods=READ)
    async def live() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.api_route("/health", methods=READ)
    @app.api_route("/health/ready", methods=READ)
    async def ready() -> JSONResponse:
        reasons = health.reasons()
        if reasons:
            return JSONResponse({"status": "not ready", "reasons": reasons}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.api_route("/metrics", methods=READ)
    async def read_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), media_type=content_type)

    return app


class HttpServer(uvicorn.Server):
    """uvicorn on httptools, without its signal handling. ``is_listening`` is set once it accepts."""

    def __init__(self, app: ASGIApp, protocol: type[Protocol] | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol or "httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=HTTP_STOP_TIMEOUT_S,
            )
        )
        self.is_listening = Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    def stop(self) -> None:
        self.should_exit = True
