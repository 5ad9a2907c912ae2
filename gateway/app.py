"""The HTTP routes of the gateway, as plain ASGI: no middleware and no framework object per token.

``Endpoint`` makes a handler an ASGI application and is where every error is answered.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import orjson
from pydantic import BaseModel, ValidationError

from common.config import GatewayConfig
from common.errors import (
    InternalError,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from common.service_classes import CLASS_HEADER, PROBE_HEADER
from gateway.call_span import traced
from gateway.calls import Call, CallFactory
from gateway.delivery import Delivery
from gateway.errors import MethodNotAllowed, RouteNotFound, error_body, error_headers, status_of
from gateway.exchange import BodyLimits, Exchange, Receive, Scope, Send, new_exchange
from gateway.journal import Journal
from gateway.metrics import GatewayMetrics
from gateway.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    tell_error,
)
from gateway.request_log import log_call, log_refusal
from gateway.responses import sse

log = logging.getLogger("lamella.gateway")

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Exchange], Awaitable[None]]

DRAINING_RETRY_S = 2.0
FULL_RETRY_S = 1.0


@dataclass(slots=True)
class GatewayApp:
    """The handlers, and the calls that are open."""

    factory: CallFactory
    journal: Journal
    metrics: GatewayMetrics
    config: GatewayConfig
    created: int
    is_draining: bool = False
    _open: set[Delivery] = field(default_factory=set)
    _admitted: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, exchange: Exchange) -> None:
        request = await self._read(exchange, ChatRequest)
        with self._admit(1):
            asked = _asked_class(exchange)
            await self._serve(exchange, await self.factory.chat(request, exchange.arrived_s, asked))

    async def completions(self, exchange: Exchange) -> None:
        request = await self._read(exchange, CompletionRequest)
        with self._admit(1):
            asked = _asked_class(exchange)
            await self._serve(exchange, await self.factory.completion(request, exchange.arrived_s, asked))

    async def models(self, exchange: Exchange) -> None:
        cards = [self._model_card(name) for name in (self.factory.model_name, "default")]
        await exchange.respond(200, orjson.dumps({"object": "list", "data": cards}))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        self.factory.check_model(name)
        await exchange.respond(200, orjson.dumps(self._model_card(name)))

    async def service_levels(self, exchange: Exchange) -> None:
        """Attainment and goodput of the last minute, by class of service (``gateway.service_levels``)."""
        levels = self.journal.judge.levels.read(time.monotonic())
        await exchange.respond(200, msgspec.json.encode(levels))

    async def tokenize(self, exchange: Exchange) -> None:
        with self._admit(1):
            request = await self._read(exchange, TokenizeRequest)
            self.factory.check_model(request.model)
            ids = await self.factory.encode_text(
                request.prompt, add_special_tokens=request.add_special_tokens
            )
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self.factory.context_length}
        await exchange.respond(200, orjson.dumps(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        with self._admit(1):
            request = await self._read(exchange, DetokenizeRequest)
            self.factory.check_model(request.model)
            text = await self.factory.decode_ids(request.tokens, "tokens")
        await exchange.respond(200, orjson.dumps({"prompt": text}))

    def _model_card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "lamella",
            "root": self.factory.model_name,
            "max_model_len": self.factory.context_length,
        }

    async def _read(self, exchange: Exchange, kind: type[Body]) -> Body:
        body = await exchange.read_json(_body_limits(self.config))
        try:
            return kind.model_validate(orjson.loads(body))
        except orjson.JSONDecodeError as exc:
            raise InvalidRequest(f"the body is not JSON: {exc}") from exc
        except ValidationError as exc:
            details = exc.errors(include_url=False, include_context=False, include_input=False)
            param, text = tell_error(details)
            raise InvalidRequest(f"{param or 'body'}: {text}", param=param) from exc

    async def not_found(self, exchange: Exchange) -> None:
        raise RouteNotFound(f"nothing is served at {exchange.scope['path']}")

    async def watch_calls(self) -> None:
        """Looks at every open call now and then, so that no call needs a timer of its own per token. Runs
        until cancelled."""
        config = self.config
        shortest_s = min(config.keep_alive_comment_s, config.slow_reader_timeout_s, config.token_timeout_s)
        while True:
            await asyncio.sleep(shortest_s / 4)
            now = time.monotonic()
            for delivery in tuple(self._open):
                delivery.look(now)

    async def wait_quiet(self) -> None:
        """Until no call is open, also none whose prompt is still being read or tokenized."""
        if self._admitted:
            await self._quiet.wait()

    @contextmanager
    def _admit(self, choices: int) -> Iterator[None]:
        """Counts choices from before their prompt costs anything until they are over. Raises the refusal."""
        if self.is_draining:
            raise NoInstanceReady("this gateway is draining", retry_after_s=DRAINING_RETRY_S)
        if self._admitted + choices > self.config.max_open_requests:
            raise Overloaded(
                f"gateway.max_open_requests = {self.config.max_open_requests} are open",
                retry_after_s=FULL_RETRY_S,
            )
        self._admitted += choices
        self._quiet.clear()
        try:
            yield
        finally:
            self._admitted -= choices
            if self._admitted == 0:
                self._quiet.set()

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        """``call``'s first choice is admitted already."""
        with self._admit(len(call.generations) - 1):
            for generation in call.generations:
                generation.is_probe = bool(exchange.header(PROBE_HEADER.encode()))
            delivery = Delivery(exchange, call, self.journal, self.metrics, self.config)
            self._open.add(delivery)
            try:
                with traced(exchange, call):
                    await delivery.run()
            finally:
                self._open.discard(delivery)
                if self.config.log_calls:
                    log_call(exchange, call)

    async def refuse(self, exchange: Exchange, error: RequestError) -> None:
        """An error as a status, or, once bytes are out, as the stream's last event."""
        if isinstance(error, RequestCancelled) and exchange.disconnected.is_set():
            return
        self.metrics.refused(error.code)
        log_refusal(exchange, error, is_told=self.config.log_calls)
        if exchange.has_started:
            await exchange.finish(sse(error_body(error)))
            return
        self.metrics.responded(status_of(error))
        await exchange.respond(status_of(error), error_body(error), error_headers(error))


def _body_limits(config: GatewayConfig) -> BodyLimits:
    settings = ("gateway.max_body_bytes", "gateway.body_timeout_s")
    return BodyLimits(config.max_body_bytes, config.body_timeout_s, *settings)


def _asked_class(exchange: Exchange) -> str | None:
    return exchange.header(CLASS_HEADER.encode()).decode("latin-1") or None


@dataclass(slots=True)
class Endpoint:
    """One handler for the methods of a path (none named: any), with every error answered.

    Who may ask has been looked at before (``gateway.access.KeyGuard``), or is by the handler (admin wishes).
    """

    gateway: GatewayApp
    handler: Handler
    methods: tuple[str, ...] = ("POST",)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = new_exchange(scope, receive, send)
        try:
            if self.methods and scope["method"] not in self.methods:
                raise MethodNotAllowed(f"{scope['path']} takes {' and '.join(self.methods)}", self.methods)
            await self.handler(exchange)
        except RequestError as exc:
            await self.gateway.refuse(exchange, exc)
        except Exception:
            facts = {"http_request": exchange.request_id, "path": scope["path"]}
            log.exception("request_failed", extra=facts)
            await self.gateway.refuse(exchange, InternalError("internal error"))
