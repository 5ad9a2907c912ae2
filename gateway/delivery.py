"""One call's way to its client: placed, then streamed or collected, and ended whatever happens.

While the client keeps up, a token goes from the bus's callback to the socket at once (``_take``); the call's
task sleeps. It wakes for the first text, for the end of a choice, and to wait for a client that is behind;
what came meanwhile then leaves as one event. After the first byte of a stream an error is an event without
``[DONE]``, which clients raise; before it, an error has its HTTP status.
"""

import asyncio
import time
from dataclasses import dataclass, field

from common.config import GatewayConfig
from common.errors import DeadlineExceeded, RequestCancelled
from common.latency import end_to_end_s
from common.service_classes import CLASS_HEADER
from gateway.calls import Call
from gateway.exchange import REQUEST_ID, Exchange, Headers
from gateway.generation import Generation
from gateway.journal import Journal
from gateway.metrics import GatewayMetrics
from gateway.responses import DONE, EMPTY_PIECE, KEEP_ALIVE, Usage

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_IGNORED_NAMES = 32
"""More would make headers that clients and proxies refuse."""


@dataclass(slots=True, eq=False)
class Delivery:
    """``_is_direct``: the stream's first bytes are out, so that tokens may overtake the task."""

    exchange: Exchange
    call: Call
    journal: Journal
    metrics: GatewayMetrics
    config: GatewayConfig
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: set[int] = field(default_factory=set)
    _is_direct: bool = False

    async def run(self) -> None:
        """From placement to the last byte. Raises what ended the call instead, RequestCancelled included."""
        for generation in self.call.generations:
            generation.notify = self._take if self.call.is_streamed else self._take_end
        watcher = asyncio.create_task(self.exchange.watch())
        watcher.add_done_callback(lambda _: self._changed.set())
        try:
            await self._place()
            self.metrics.prompt_tokens.inc(self.call.prompt_tokens)
            if self.call.is_streamed:
                await self._stream()
            else:
                await self._collect()
            self._count_finished()
        finally:
            watcher.cancel()
            if self.exchange.disconnected.is_set():
                self.metrics.disconnects.inc()
            for generation in self.call.generations:
                self.journal.end(generation)

    def look(self, now: float) -> None:
        """What time alone brings: cuts a client that does not read, else lets the task look around."""
        since_s = self.exchange.writing_since_s
        if since_s is None:
            self._changed.set()
        elif now - since_s > self.config.slow_reader_timeout_s:
            self.exchange.cut()

    # told by the journal

    def _take(self, generation: Generation) -> None:
        if not self._is_direct or generation.is_over or not self.exchange.can_write_now:
            self._changed.set()
            return
        piece = generation.read()
        if piece is not None:
            self.exchange.write_now(self.call.encoder.piece(generation.index, piece))

    def _take_end(self, generation: Generation) -> None:
        if generation.is_over:
            self._changed.set()

    # the call's task

    async def _place(self) -> None:
        """All choices or none. Raises the first refusal, or RequestCancelled when the client left."""

        async def place_all() -> None:
            await asyncio.gather(*(self.journal.start(each) for each in self.call.generations))

        placing = asyncio.create_task(place_all())
        left = asyncio.create_task(self.exchange.disconnected.wait())
        try:
            await asyncio.wait({placing, left}, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done():
                raise RequestCancelled("the client left")
            placing.result()
        finally:
            placing.cancel()
            left.cancel()

    async def _collect(self) -> None:
        generations = self.call.generations
        while not all(generation.is_over for generation in generations):
            await self._wait_change()
        self._raise_first_error()
        choices = [(generation, generation.read() or EMPTY_PIECE) for generation in generations]
        body = self.call.encoder.whole(choices, self._usage())
        self.metrics.responded(200)
        await self.exchange.respond(200, body, self._told())

    async def _stream(self) -> None:
        while True:
            body = self._read()
            if any(generation.error is not None for generation in self.call.generations):
                if body:
                    await self._write(body)
                self._raise_first_error()
            if len(self._finished) == len(self.call.generations):
                break
            if body:
                await self._write(body)
                continue
            await self._wait_change()
            silent_s = time.monotonic() - self.exchange.last_written_s
            if silent_s > self.config.keep_alive_comment_s:
                await self._write(KEEP_ALIVE)
        tail = self.call.encoder.usage(self._usage()) if self.call.wants_usage else b""
        opening = b"" if self.exchange.has_started else await self._open()
        await self.exchange.write(opening + body + tail + DONE, more=False)

    def _read(self) -> bytes:
        """The events of everything that became certain since the last look."""
        encoder = self.call.encoder
        events: list[bytes] = []
        for generation in self.call.generations:
            if generation.index in self._finished:
                continue
            piece = generation.read()
            if piece is not None:
                events.append(encoder.piece(generation.index, piece))
            if generation.finish_reason is not None:
                self._finished.add(generation.index)
                events.append(encoder.finish(generation.index, generation.finish_reason))
        return b"".join(events)

    async def _write(self, body: bytes) -> None:
        opening = b"" if self.exchange.has_started else await self._open()
        await self.exchange.write(opening + body, more=True)
        self._is_direct = True

    async def _open(self) -> bytes:
        """Sends status and headers, and gives each choice's first event. Until here a refusal has a status,
        which is why a stream opens with its first text, or its first sign of life while it is queued."""
        await self.exchange.start(200, [*STREAM_HEADERS, *self._told()])
        self.metrics.responded(200)
        return b"".join(self.call.encoder.opening(each.index) for each in self.call.generations)

    async def _wait_change(self) -> None:
        """Until something changed, or it is time to look. Raises RequestCancelled, DeadlineExceeded."""
        await self._changed.wait()
        self._changed.clear()
        if self.exchange.disconnected.is_set():
            raise RequestCancelled("the client left")
        timeout_s = self.config.token_timeout_s
        now = time.monotonic()
        for generation in self.call.generations:
            since_s = generation.last_token_s or generation.arrived_s
            if not generation.is_over and now - since_s > timeout_s:
                raise DeadlineExceeded(f"no token for gateway.token_timeout_s = {timeout_s:g} s")

    def _raise_first_error(self) -> None:
        for generation in self.call.generations:
            if generation.error is not None:
                raise generation.error

    def _count_finished(self) -> None:
        now, generations = time.monotonic(), self.call.generations
        for generation in generations:
            self.metrics.finished("length" if generation.finish_reason == "length" else "stop")
            self.metrics.end_to_end.observe(end_to_end_s(generation.arrived_s, now))
            if generation.first_token_s is not None and generation.last_token_s is not None:
                self.metrics.decode_time.observe(generation.last_token_s - generation.first_token_s)
        self.metrics.served(self.call.prompt_tokens, [len(each.output_ids) for each in generations])

    def _usage(self) -> Usage:
        tokens = sum(len(generation.output_ids) for generation in self.call.generations)
        return Usage(self.call.prompt_tokens, tokens)

    def _told(self) -> Headers:
        """The class of service that the call has, and the fields that had no effect."""
        told = [(CLASS_HEADER.encode(), self.call.service_class.encode())]
        names = [name for name in self.call.ignored_fields if REQUEST_ID.fullmatch(name)][:MAX_IGNORED_NAMES]
        if names:
            told.append((b"x-lamella-ignored-params", ", ".join(names).encode()))
        return told
