"""The private port: a second HTTP server of the gateway, for operators and never for clients.

It listens on this machine alone unless ``gateway.private_host`` says otherwise, and answers nobody who asks
for it by the name of some site: a page elsewhere could otherwise have its own name resolve to this machine,
and read what only this machine may.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message

from common.config import GatewayConfig
from common.errors import ConfigError
from common.http import HttpServer
from common.listening import Place, bind, port_of, url_of
from gateway.access import KeyGuard, Keys
from gateway.app import Endpoint, GatewayApp
from gateway.errors import Forbidden, error_body, status_of
from gateway.exchange import Receive, Scope, Send, new_exchange
from gateway.private.admin import Admin
from gateway.private.operator_view import OperatorView
from gateway.protocol import guarded_protocol

log = logging.getLogger("lamella.gateway")

READ = ("GET", "HEAD")
PLACE = Place("gateway.private_host", "gateway.private_port")
STATIC = Path(__file__).resolve().parents[1] / "static"
PAGE_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; style-src 'self' 'unsafe-inline';"
        b" img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]  # fmt: skip
"""The page loads nothing from anywhere else, and nobody may frame it; after an upgrade it is the new one."""


def listen(config: GatewayConfig) -> socket.socket:
    """On ``private_port``; where that is taken, on a free one. Raises ConfigError for a host that is none."""
    try:
        return bind(config.private_host, config.private_port, PLACE)
    except ConfigError as exc:
        if config.private_port == 0 or exc.key != PLACE.port:
            raise
        log.warning("private_port_taken", extra={"error": str(exc)})
        return bind(config.private_host, 0, PLACE)


@dataclass(slots=True)
class PrivateServer:
    """``run`` is to be spawned; ``close`` ends it, after its streams."""

    view: OperatorView
    url: str
    _server: HttpServer
    _serving: asyncio.Task[None] = field(init=False)

    def start(self, listener: socket.socket) -> None:
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def run(self) -> None:
        """As long as it serves. Not ended with the process's other tasks: a drain can be watched."""
        await asyncio.shield(self._serving)

    async def close(self) -> None:
        self.view.close()
        self._server.stop()
        await self._serving


def private_server(
    gateway: GatewayApp,
    view: OperatorView,
    admin: Admin,
    metrics: ASGIApp,
    public: Sequence[BaseRoute],
    api_keys: Keys | None,
    advertise_host: str,
) -> PrivateServer:
    """Listens, and serves. ``metrics`` answers ``/metrics``; ``public``: the routes of the public port, for
    the page's own chat; they want the same keys as there, or the admin key. Raises ConfigError."""
    config = gateway.config
    listener = listen(config)
    is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    host = config.private_host if is_local else advertise_host
    app: ASGIApp = Starlette(routes=_routes(gateway, view, admin, metrics, public, api_keys))
    app = HostGuard(app, frozenset(("localhost", advertise_host, config.private_host)))
    server = HttpServer(app, guarded_protocol(config.header_timeout_s, config.body_timeout_s))
    url = url_of(host, port_of(listener))
    private = PrivateServer(view, url, server)
    private.start(listener)
    return private


def _routes(
    gateway: GatewayApp,
    view: OperatorView,
    admin: Admin,
    metrics: ASGIApp,
    public: Sequence[BaseRoute],
    api_keys: Keys | None,
) -> list[BaseRoute]:
    model: ASGIApp = Router(public, default=Endpoint(gateway, gateway.not_found, ()))
    if api_keys is not None:
        operators = () if admin.keys is None else admin.keys.digests
        model = KeyGuard(model, Keys(api_keys.digests + operators))
    page = StaticFiles(directory=STATIC, html=True)
    return [
        Route("/api/mesh", Endpoint(gateway, view.mesh, READ)),
        Route("/api/latency", Endpoint(gateway, view.latency, READ)),
        Route("/api/requests", Endpoint(gateway, view.requests, READ)),
        Route("/api/requests/{name}", Endpoint(gateway, view.request, READ)),
        Route("/api/decisions", Endpoint(gateway, view.decisions, READ)),
        Route("/api/events", Endpoint(gateway, view.events, ("GET",))),
        *(Route(f"/api/{name}", Endpoint(gateway, each)) for name, each in admin.handlers.items()),
        Route("/service-levels", Endpoint(gateway, gateway.service_levels, READ)),
        Route("/metrics", metrics, methods=READ),
        *(Route(path, RedirectResponse("/ui/")) for path in ("/", "/ui")),
        Mount("/ui", WithHeaders(page)),
        Mount("/", model),
    ]


@dataclass(frozen=True, slots=True)
class WithHeaders:
    """An application whose answers all bear ``PAGE_HEADERS``."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *PAGE_HEADERS]
            await send(message)

        await self.app(scope, receive, send_more)


@dataclass(frozen=True, slots=True)
class HostGuard:
    """Answers who asks by address or by a name of this machine: ``names``, or one without a dot, which only
    this network can resolve."""

    app: ASGIApp
    names: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = new_exchange(scope, receive, send)
            if not self._is_known(exchange.header(b"host").decode("latin-1")):
                error = Forbidden("the private port is not served under that name")
                await exchange.respond(status_of(error), error_body(error))
                return
        await self.app(scope, receive, send)

    def _is_known(self, sent: str) -> bool:
        host = sent.rpartition("]")[0].removeprefix("[") if sent.startswith("[") else sent.partition(":")[0]
        if host in self.names or ("." not in host.strip(".") and ":" not in host):
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True
