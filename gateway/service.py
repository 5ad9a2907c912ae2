"""`lamella serve gateway`: the wires, the tokenizer and the routes put together."""

import asyncio
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import orjson
from starlette.routing import Route
from starlette.types import ASGIApp

from common.config import Config
from common.errors import NoInstanceReady
from common.ids import GatewayId
from common.messages import Announcement, GatewayEvent, WishNews
from common.model.tokens import Tokenizer
from common.release import installed_version
from common.service import Running, ServiceProcess, run_service
from common.service_classes import service_classes_of
from common.spec import read_spec, served_context_length
from common.telemetry import export_model
from gateway.access import KeyGuard, Keys, read_admin_key, read_api_keys
from gateway.app import Endpoint, GatewayApp
from gateway.calls import CallFactory
from gateway.errors import error_body, error_headers, status_of
from gateway.exchange import Exchange, Receive, Scope, Send, new_exchange
from gateway.journal import Journal
from gateway.metrics import GatewayMetrics
from gateway.outages import Outages
from gateway.private.admin import Admin
from gateway.private.mesh_watch import MeshWatch
from gateway.private.operator_view import OperatorView
from gateway.private.server import PrivateServer, private_server
from gateway.private.wishes import WishLog
from gateway.protocol import guarded_protocol

log = logging.getLogger("lamella.gateway")

READ = ("GET", "HEAD")
STARTING_RETRY_S = 1.0
GARBAGE_THRESHOLD = 50_000
"""Containers made and not yet dropped, after which the youngest are searched for cycles."""


async def run_gateway(config: Config, model_directory: Path) -> None:
    """Runs one gateway until it is told to stop. Raises ModelError for an unreadable tokenizer, ConfigError
    for keys that cannot be read or a port that cannot be listened on."""

    async def start(process: ServiceProcess) -> Running:
        return await _start(process, model_directory)

    protocol = guarded_protocol(config.gateway.header_timeout_s, config.gateway.body_timeout_s)
    guard = partial(_guarded, config)
    await run_service(config, "gateway", start, protocol, _refuse_while_starting, guard)


async def _refuse_while_starting(scope: Scope, receive: Receive, send: Send) -> None:
    """The port is open before the bus and the tokenizer are there: a 404 would send clients away for good."""
    error = NoInstanceReady("this gateway is starting", retry_after_s=STARTING_RETRY_S)
    exchange = new_exchange(scope, receive, send)
    await exchange.respond(status_of(error), error_body(error), error_headers(error))


async def _start(process: ServiceProcess, model_directory: Path) -> Running:
    config = process.config
    gateway_id = GatewayId(process.service_id)
    spec = read_spec(model_directory)
    threads = ThreadPoolExecutor(config.gateway.tokenizer_threads, thread_name_prefix="tokenizer")
    tokenizer = await asyncio.get_running_loop().run_in_executor(threads, Tokenizer, model_directory)
    classes = service_classes_of(config)
    metrics = GatewayMetrics(process.registry, tuple(classes))
    export_model(process.registry, spec.name)
    journal = Journal(gateway_id, config, process.bus, process.subjects, metrics, process.spawn)
    gateway = GatewayApp(
        factory=CallFactory(
            gateway_id=gateway_id,
            model_name=spec.name,
            context_length=served_context_length(spec, config.model.context_length),
            vocab_size=spec.vocab_size,
            tokenizer=tokenizer,
            config=config.gateway,
            service_classes=classes,
            threads=threads,
        ),
        journal=journal,
        metrics=metrics,
        config=config.gateway,
        created=int(time.time()),
    )
    await process.bus.subscribe(process.subjects.gateway_events(gateway_id), GatewayEvent, journal.take)
    await process.bus.subscribe(process.subjects.everyone(), Announcement, journal.take)
    outages = Outages(journal, config.gateway.bus_timeout_s)
    process.bus.on_disconnect.append(outages.note_disconnect)
    process.bus.on_reconnect.append(outages.note_reconnect)
    process.bus.on_loss.append(outages.note_loss)
    process.app.router.routes.extend(routes(gateway))
    process.app.router.default = Endpoint(gateway, gateway.not_found, ())
    process.spawn(gateway.watch_calls())
    wish_log = WishLog(time.monotonic)
    await process.bus.subscribe(process.subjects.admin_news(), WishNews, wish_log.take)
    private = _private_server(process, gateway, wish_log)
    process.spawn(private.run())
    _collect_seldom()

    async def drain(timeout_s: float) -> None:
        gateway.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await gateway.wait_quiet()
        except TimeoutError:
            journal.fail_all("this gateway is shutting down")
            await gateway.wait_quiet()

    async def close() -> None:
        await private.close()
        threads.shutdown(wait=False, cancel_futures=True)

    record = msgspec.structs.replace(process.record("gateway"), private_url=private.url)
    return Running(record, drain, close)


def _private_server(process: ServiceProcess, gateway: GatewayApp, wish_log: WishLog) -> PrivateServer:
    """Raises ConfigError."""
    config = process.config
    file = config.gateway.admin_key_file
    keys = None if file is None else read_admin_key(file)
    admin = Admin(process.bus, process.store, process.subjects, config.mesh, keys)
    model = gateway.factory.model_name
    watch = MeshWatch(
        process.service_id, model, config, process.store, process.subjects, admin.wishes, wish_log
    )
    view = OperatorView(gateway.journal, watch, process.store, config.gateway.slow_reader_timeout_s)
    host = config.service.advertise_host
    private = private_server(gateway, view, admin, process.app, routes(gateway), _api_keys(config), host)
    process.spawn(watch.run())
    process.spawn(view.count_tokens())
    log.info("private_listening", extra={"url": private.url})
    return private


def _guarded(config: Config, app: ASGIApp) -> ASGIApp:
    """Raises ConfigError: only once the process can log, which is how it says why it does not start."""
    keys = _api_keys(config)
    return app if keys is None else KeyGuard(app, keys)


def _api_keys(config: Config) -> Keys | None:
    file = config.gateway.api_keys_file
    return None if file is None else read_api_keys(file)


def _collect_seldom() -> None:
    """Tokens make and drop a million small objects a second, hardly any of them in a cycle: what is loaded
    now is never looked at again, and the rest seldom. It was a tenth of a token's cost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 10, 10)


def routes(gateway: GatewayApp) -> list[Route]:
    async def tell_version(exchange: Exchange) -> None:
        await exchange.respond(200, orjson.dumps({"version": installed_version()}))

    return [
        Route("/v1/chat/completions", Endpoint(gateway, gateway.chat)),
        Route("/v1/completions", Endpoint(gateway, gateway.completions)),
        Route("/v1/models", Endpoint(gateway, gateway.models, READ)),
        Route("/v1/models/{name:path}", Endpoint(gateway, gateway.model, READ)),
        Route("/tokenize", Endpoint(gateway, gateway.tokenize)),
        Route("/detokenize", Endpoint(gateway, gateway.detokenize)),
        Route("/service-levels", Endpoint(gateway, gateway.service_levels, READ)),
        Route("/version", Endpoint(gateway, tell_version, READ)),
    ]
