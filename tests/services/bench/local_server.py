"""A small OpenAI-compatible server on a real socket, which can also misbehave the way real ones do.

Tokens are words without meaning; what is under test is the client. ``gate`` holds every answer back until it
is set, so that a test decides when the server is slow.
"""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Behaviour(Enum):
    SERVE = "serve"
    COALESCE = "coalesce"
    WITHOUT_USAGE = "without_usage"
    WITHOUT_DONE = "without_done"
    CLOSE_AFTER_EACH = "close_after_each"
    CLOSE_DELIMITED = "close_delimited"
    SHORT_OUTPUT = "short_output"
    OVERLOADED = "overloaded"
    ERROR_EVENT = "error_event"
    MALFORMED_EVENT = "malformed_event"
    UNFINISHED = "unfinished"
    BREAK_OFF = "break_off"
    NOT_A_STREAM = "not_a_stream"
    NOT_HTTP = "not_http"
    UNAUTHORIZED = "unauthorized"


OVERLOADED_BODY = b'{"error":{"message":"full","type":"server_error","code":"over"}}'
JSON_HEAD = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
UNSERVED = {
    Behaviour.OVERLOADED: b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 0.05\r\n"
    + JSON_HEAD % (len(OVERLOADED_BODY), OVERLOADED_BODY),
    Behaviour.NOT_A_STREAM: b"HTTP/1.1 200 OK\r\n" + JSON_HEAD % (2, b"{}"),
    Behaviour.UNAUTHORIZED: b"HTTP/1.1 401 Unauthorized\r\n" + JSON_HEAD % (2, b"{}"),
    Behaviour.NOT_HTTP: b"SSH-2.0-OpenSSH_9.6\r\n",
}


@dataclass(slots=True)
class LocalServer:
    behaviour: Behaviour = Behaviour.SERVE
    template_tokens: int = 0
    context_tokens: int | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    connections: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: dict["asyncio.Task[None]", asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "LocalServer":
        self.gate.set()
        self._server = await asyncio.start_server(self._serve_connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        self.gate.set()
        for writer in self._writers.values():
            writer.transport.abort()
        await asyncio.gather(*self._writers)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._writers[task] = writer
        self.connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._serve_request(reader, writer):
                    pass
        finally:
            del self._writers[task]
            writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False to close the connection after it."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
        body = await reader.readexactly(int(length.split(":")[1]))
        if head.startswith("GET /v1/models ") and self.behaviour is not Behaviour.UNAUTHORIZED:
            card = {"id": "words", "object": "model", "max_model_len": self.context_tokens}
            await _write_json(writer, {"object": "list", "data": [card]})
            return True
        request = json.loads(body or b"{}")
        self.bodies.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.gate.wait()
            if self.behaviour in UNSERVED:
                writer.write(UNSERVED[self.behaviour])
                await writer.drain()
                return self.behaviour is not Behaviour.NOT_HTTP
            return await self._stream(writer, request, is_chat=" /v1/chat/" in head)
        finally:
            self.in_flight -= 1

    async def _stream(self, writer: asyncio.StreamWriter, request: dict[str, Any], is_chat: bool) -> bool:
        is_framed = self.behaviour is not Behaviour.CLOSE_DELIMITED
        framing = b"transfer-encoding: chunked\r\n" if is_framed else b""
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n" + framing + b"\r\n"
        )
        for event in self._events(request, is_chat):
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_framed else data)
            await writer.drain()
            await asyncio.sleep(0)
        if self.behaviour is Behaviour.BREAK_OFF:
            return False
        if is_framed:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return self.behaviour not in (Behaviour.CLOSE_AFTER_EACH, Behaviour.CLOSE_DELIMITED)

    def _events(self, request: dict[str, Any], is_chat: bool) -> list[bytes]:
        wanted = request["max_tokens"] - (self.behaviour is Behaviour.SHORT_OUTPUT)
        step = 2 if self.behaviour is Behaviour.COALESCE else 1
        events = [_role_event()] if is_chat else []
        for first in range(0, wanted, step):
            events.append(_token_event(is_chat, min(step, wanted - first), is_last=first + step >= wanted))
        match self.behaviour:
            case Behaviour.ERROR_EVENT:
                return [
                    *events[:2],
                    b'{"error":{"message":"lost","type":"server_error","code":"instance_lost"}}',
                ]
            case Behaviour.MALFORMED_EVENT:
                return [*events[:2], b'{"choices":[']
            case Behaviour.UNFINISHED | Behaviour.BREAK_OFF:
                return events[:2]
            case Behaviour.WITHOUT_USAGE:
                return [*events, b"[DONE]"]
        usage = {"prompt_tokens": self._count_prompt(request), "completion_tokens": wanted}
        events.append(json.dumps({"choices": [], "usage": usage}).encode())
        return events if self.behaviour is Behaviour.WITHOUT_DONE else [*events, b"[DONE]"]

    def _count_prompt(self, request: dict[str, Any]) -> int:
        prompt = request["messages"][0]["content"] if "messages" in request else request["prompt"]
        words = prompt.split() if isinstance(prompt, str) else prompt
        return len(words) + self.template_tokens


def _role_event() -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return json.dumps({"choices": [choice]}).encode()


def _token_event(is_chat: bool, tokens: int, is_last: bool) -> bytes:
    text = " word" * tokens
    said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    return json.dumps(
        {"choices": [{"index": 0, "finish_reason": "length" if is_last else None, **said}]}
    ).encode()


async def _write_json(writer: asyncio.StreamWriter, value: object) -> None:
    body = json.dumps(value).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)
    await writer.drain()
