"""The HTTP routes of the gateway, as plain ASGI: a stream's bytes go to the server's transport directly.

Every request is watched for a disconnect, streamed or not, because servers tell only whoever asks; a client
that leaves ends its choices wherever they are. After the first byte of a stream an error is an event without
``[DONE]``, which clients raise; before it, an error has its HTTP status.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from common.config import GatewayConfig
from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from common.telemetry import GatewayMetrics
from gateway.calls import Call, CallFactory
from gateway.errors import MethodNotAllowed, PayloadTooLarge, error_body, error_headers, status_of
from gateway.generation import Generation
from gateway.journal import Journal, broken
from gateway.openai import ChatRequest, CompletionRequest
from gateway.responses import DONE, EMPTY_PIECE, KEEP_ALIVE, Usage, sse

log = logging.getLogger("lamella.gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Body = TypeVar("Body", bound=BaseModel)

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
JSON = (b"content-type", b"application/json")
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DRAINING_RETRY_S = 2.0
FULL_RETRY_S = 1.0


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str = "default"
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str = "default"
    tokens: list[int]


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request and the answer to it. ``disconnected`` is set when the client is gone."""

    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    has_started: bool = False
    last_written_s: float = 0.0
    writing_since_s: float | None = None
    is_stuck: bool = False
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    async def read_body(self, limit: int) -> bytes:
        """Raises PayloadTooLarge, RequestCancelled."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise RequestCancelled("the client left before its request was complete")
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise PayloadTooLarge(f"the body is over gateway.max_body_bytes = {limit}")
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def watch(self) -> None:
        """Returns when the client is gone. Nothing else may read from ``receive`` meanwhile."""
        while (await self.receive())["type"] != "http.disconnect":
            continue
        self.disconnected.set()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started = True
        identity = (b"x-request-id", self.request_id.encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [identity, *headers]})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Waits for a client that reads too slowly; ``GatewayApp.watch_calls`` ends one that never does."""
        self.last_written_s = self.writing_since_s = time.monotonic()
        await self.send({"type": "http.response.body", "body": body, "more_body": more})
        self.writing_since_s = None

    async def respond(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [JSON, length, *(headers or [])])
        await self.write(body, more=False)


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True)
class GatewayApp:
    """The handlers. An ``Endpoint`` makes one of them an ASGI application."""

    factory: CallFactory
    journal: Journal
    metrics: GatewayMetrics
    config: GatewayConfig
    created: int
    is_draining: bool = False
    _open: dict[Exchange, tuple[Call, asyncio.Task[None]]] = field(default_factory=dict)

    async def chat(self, exchange: Exchange) -> None:
        request = await self._read(exchange, ChatRequest)
        await self._serve(exchange, await self.factory.chat(request))

    async def completions(self, exchange: Exchange) -> None:
        request = await self._read(exchange, CompletionRequest)
        await self._serve(exchange, await self.factory.completion(request))

    async def models(self, exchange: Exchange) -> None:
        cards = [self._model_card(name) for name in (self.factory.model_name, "default")]
        await exchange.respond(200, orjson.dumps({"object": "list", "data": cards}))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        self.factory.check_model(name)
        await exchange.respond(200, orjson.dumps(self._model_card(name)))

    async def tokenize(self, exchange: Exchange) -> None:
        request = await self._read(exchange, TokenizeRequest)
        self.factory.check_model(request.model)
        ids = await self.factory.encode_text(request.prompt, add_special_tokens=request.add_special_tokens)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self.factory.context_length}
        await exchange.respond(200, orjson.dumps(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        request = await self._read(exchange, DetokenizeRequest)
        self.factory.check_model(request.model)
        for token_id in request.tokens:
            if not 0 <= token_id < self.factory.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id}: the vocabulary has 0..{self.factory.vocab_size - 1}",
                    param="tokens",
                )
        text = self.factory.tokenizer.decode(request.tokens, skip_special_tokens=False)
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
        body = await exchange.read_body(self.config.max_body_bytes)
        try:
            return kind.model_validate(orjson.loads(body))
        except orjson.JSONDecodeError as exc:
            raise InvalidRequest(f"the body is not JSON: {exc}") from exc
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
            param = ".".join(str(part) for part in first["loc"])
            raise InvalidRequest(f"{param or 'body'}: {first['msg']}", param=param or None) from exc

    # one call, from its placement to its last byte

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        if self.is_draining:
            raise NoInstanceReady("this gateway is draining", retry_after_s=DRAINING_RETRY_S)
        if len(self.journal.open) + len(call.generations) > self.config.max_open_requests:
            raise Overloaded(
                f"gateway.max_open_requests = {self.config.max_open_requests} are open",
                retry_after_s=FULL_RETRY_S,
            )
        watcher = asyncio.create_task(exchange.watch())
        watcher.add_done_callback(lambda _: call.changed.set())
        exchange.last_written_s = time.monotonic()
        task = asyncio.current_task()
        assert task is not None
        self._open[exchange] = (call, task)
        try:
            await self._place(exchange, call)
            self.metrics.prompt_tokens.inc(call.prompt_tokens)
            if call.is_streamed:
                await self._stream(exchange, call)
            else:
                await self._collect(exchange, call)
        except asyncio.CancelledError:
            if not exchange.is_stuck:
                raise
            raise RequestCancelled("the client read nothing for too long") from None
        finally:
            del self._open[exchange]
            watcher.cancel()
            if exchange.disconnected.is_set():
                self.metrics.disconnects.inc()
            for generation in call.generations:
                self.journal.end(generation)

    async def _place(self, exchange: Exchange, call: Call) -> None:
        """All choices or none. Raises the first refusal, or RequestCancelled when the client left."""

        async def place_all() -> None:
            await asyncio.gather(*(self.journal.start(each) for each in call.generations))

        placing = asyncio.create_task(place_all())
        left = asyncio.create_task(exchange.disconnected.wait())
        try:
            await asyncio.wait({placing, left}, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done():
                raise RequestCancelled("the client left")
            placing.result()
        finally:
            placing.cancel()
            left.cancel()

    async def watch_calls(self) -> None:
        """Looks at every open call now and then, so that no call needs a timer of its own per token: wakes
        the silent ones, and ends those whose client has stopped reading. Runs until cancelled."""
        config = self.config
        interval_s = min(config.keep_alive_comment_s, config.slow_reader_timeout_s) / 4
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            for exchange, (call, task) in list(self._open.items()):
                since_s = exchange.writing_since_s
                if since_s is None:
                    call.changed.set()
                elif now - since_s > config.slow_reader_timeout_s and not exchange.is_stuck:
                    exchange.is_stuck = True
                    task.cancel()

    async def _collect(self, exchange: Exchange, call: Call) -> None:
        while not all(generation.is_over for generation in call.generations):
            await self._wait(exchange, call)
            self._check_silence(call)
        for generation in call.generations:
            if generation.error is not None:
                raise broken(generation)
        choices = [(generation, generation.read() or EMPTY_PIECE) for generation in call.generations]
        body = call.encoder.whole(choices, _usage(call))
        self._count_finished(call)
        await exchange.respond(200, body, _ignored(call))
        self.metrics.responded(200)

    async def _stream(self, exchange: Exchange, call: Call) -> None:
        """The response starts with the first text, so that a refusal until then has its HTTP status."""
        finished: set[int] = set()
        while len(finished) < len(call.generations):
            chunks: list[bytes] = []
            for generation in call.generations:
                if generation.index not in finished:
                    chunks.extend(self._chunks(call, generation, finished))
            if chunks:
                if not exchange.has_started:
                    await exchange.start(200, [*STREAM_HEADERS, *_ignored(call)])
                    self.metrics.responded(200)
                    chunks[:0] = (call.encoder.opening(each.index) for each in call.generations)
                await exchange.write(b"".join(chunks), more=True)
                continue
            await self._wait(exchange, call)
            self._check_silence(call)
            is_silent = time.monotonic() - exchange.last_written_s > self.config.keep_alive_comment_s
            if exchange.has_started and is_silent:
                await exchange.write(KEEP_ALIVE, more=True)
        self._count_finished(call)
        tail = call.encoder.usage(_usage(call)) if call.wants_usage else b""
        await exchange.write(tail + DONE, more=False)

    def _check_silence(self, call: Call) -> None:
        """Raises DeadlineExceeded for a choice whose next token has been awaited for too long."""
        timeout_s = self.config.first_token_timeout_s
        now = time.monotonic()
        for generation in call.generations:
            since_s = generation.last_token_s or generation.arrived_s
            if not generation.is_over and now - since_s > timeout_s:
                raise DeadlineExceeded(f"no token for gateway.first_token_timeout_s = {timeout_s:.0f} s")

    def _chunks(self, call: Call, generation: Generation, finished: set[int]) -> list[bytes]:
        """What this choice has to say since the last look. Raises its error."""
        chunks: list[bytes] = []
        piece = generation.read()
        if piece is not None and (piece.text or piece.tokens):
            chunks.append(call.encoder.piece(generation.index, piece))
        if generation.error is not None:
            raise broken(generation)
        if generation.finish_reason is not None:
            finished.add(generation.index)
            chunks.append(call.encoder.finish(generation.index, generation.finish_reason))
        return chunks

    async def _wait(self, exchange: Exchange, call: Call) -> None:
        """Until something changed, or it is time to look. Raises RequestCancelled when the client left."""
        await call.changed.wait()
        call.changed.clear()
        if exchange.disconnected.is_set():
            raise RequestCancelled("the client left")

    def _count_finished(self, call: Call) -> None:
        for generation in call.generations:
            self.metrics.finished("length" if generation.finish_reason == "length" else "stop")

    async def refuse(self, exchange: Exchange, error: RequestError) -> None:
        """An error as a status, or, once bytes are out, as the stream's last event."""
        if isinstance(error, RequestCancelled):
            return
        if status_of(error) >= 500:
            log.warning("request_refused", extra={"error": error.message, "code": error.code})
        if exchange.has_started:
            await exchange.write(sse(error_body(error)), more=False)
            return
        self.metrics.responded(status_of(error))
        await exchange.respond(status_of(error), error_body(error), error_headers(error))


@dataclass(slots=True)
class Endpoint:
    """One handler for one method of a path, with every error answered."""

    gateway: GatewayApp
    handler: Handler
    method: str = "POST"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, _request_id(scope))
        try:
            if scope["method"] != self.method:
                raise MethodNotAllowed(f"{scope['path']} takes {self.method}")
            await self.handler(exchange)
        except RequestError as exc:
            await self.gateway.refuse(exchange, exc)
        except Exception:
            log.exception("request_failed", extra={"path": scope["path"]})
            await self.gateway.refuse(exchange, InternalError("internal error"))


def _usage(call: Call) -> Usage:
    return Usage(call.prompt_tokens, sum(len(generation.output_ids) for generation in call.generations))


def _ignored(call: Call) -> list[tuple[bytes, bytes]]:
    if not call.ignored_fields:
        return []
    names = ", ".join(name for name in call.ignored_fields if REQUEST_ID.fullmatch(name))
    return [(b"x-lamella-ignored-params", names.encode())]


def _request_id(scope: Scope) -> str:
    """The client's own if it is a plain word, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if REQUEST_ID.fullmatch(text):
                return str(text)
    return f"req-{secrets.token_hex(12)}"
