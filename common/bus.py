"""The control plane's bus: calls, served subjects, subscriptions and publishes over NATS.

The only importer of nats. What nats-py leaves to its user is settled here once:

- A subscription is active on the server when ``serve`` or ``subscribe`` returns. One flush is no barrier,
  because its PING overtakes the buffered SUB.
- A call in flight fails the moment the connection is lost; it does not wait for its own deadline.
- An exception in a handler always reaches the caller, as an ErrorReply; one in a callback is logged and
  counted.
- Everything leaves through one outbox, so order is kept. The outbox is bounded and full is BusUnavailable.
- Lost messages (slow consumer, no room) are counted. Receivers notice them by the indexes in the messages.

NATS carries decisions and tokens; never KV, activations or a step's critical path.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, OutboundBufferLimitError, SlowConsumerError
from nats.errors import Error as NatsError

from common.cancellation import cancel_and_wait
from common.errors import BusError, BusTimeout, BusUnavailable, MessageTooLarge, NoResponder
from common.messages import ErrorReply, as_request_error
from common.outbox import Outbox, Outgoing
from common.served import Handler, ServedSubject
from common.subjects import Subjects

log = logging.getLogger("lamella.bus")

Reply = TypeVar("Reply", bound=msgspec.Struct)
MessageTypes = type[msgspec.Struct] | UnionType
"""A message type, or a union of tagged ones."""
Callback = Callable[[Any], None]
"""Takes one decoded message. It must not block: it puts the message where it belongs."""

OUTBOX_BYTES = 2 << 20
"""Twice the largest message."""
CLIENT_BUFFER_BYTES = 256 << 10
"""nats-py's own buffer. Small, since after an outage stale tokens are better resumed than replayed."""
SUBSCRIPTION_MESSAGES = 65_536
SUBSCRIPTION_BYTES = 64 << 20
WAITING_CALLS = 1024
"""Calls of one served subject that may wait while ``max_concurrent`` are being answered."""
RECONNECT_WAIT_S = 0.1
SERVER_CONNECT_TIMEOUT_S = 1
PING_INTERVAL_S = 2
BARRIER_TIMEOUT_S = 5.0
ROUND_TRIP_LIMIT_S = 3600
"""Longer than any connection that does not answer pings."""
CLOSE_TIMEOUT_S = 10.0

_encode = msgspec.msgpack.Encoder().encode


@cache
def _decoder(kind: MessageTypes) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@dataclass(slots=True)
class BusCounters:
    """Totals since the process started."""

    reconnects: int = 0
    slow_consumer: int = 0
    dropped: int = 0
    malformed: int = 0
    callback_failures: int = 0


class Bus:
    """One connection to NATS. ``on_reconnect``, ``on_disconnect`` and ``on_loss`` (messages to here were
    dropped) are called on the event loop.

    ``name`` is the service's id; it names the connection and the inbox, so that NATS permissions can keep
    services out of each other's replies. The URL may hold ``user:password@`` or ``token@``.
    """

    def __init__(self, url: str, *, name: str, subjects: Subjects) -> None:
        self.counters = BusCounters()
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_loss: list[Callable[[], None]] = []
        self.on_disconnect: list[Callable[[], None]] = []
        self._url = url
        self._name = name
        self._inbox = f"_INBOX.{subjects.namespace}.{name}.{secrets.token_hex(8)}"
        self._client = Client()
        self._outbox = Outbox(self._send, OUTBOX_BYTES)
        self._lost: asyncio.Future[None] | None = None
        self._is_started = False
        self._is_closing = False
        self._last_error = ""
        self._violation: str | None = None
        self._calls: dict[str, asyncio.Future[Msg]] = {}
        self._calls_made = 0
        self._round_trips: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []
        self._served: list[ServedSubject] = []

    @property
    def is_connected(self) -> bool:
        return self._is_started and not self._is_closing and self._client.is_connected

    @property
    def max_message_bytes(self) -> int:
        """The server's payload limit, known once connected."""
        return self._client.max_payload

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Tries until ``timeout_s`` is over. Raises BusUnavailable; refused credentials end it at once."""
        self._lost = asyncio.get_running_loop().create_future()
        attempt = asyncio.create_task(self._connect_client())
        try:
            await asyncio.wait({attempt, self._lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_over = attempt.done()
            if not is_over:
                await cancel_and_wait(attempt)
                await self._client.close()
        if self._lost.done():
            self._lost.result()
        if not is_over:
            reason = self._last_error or "no answer"
            raise BusUnavailable(f"NATS at {_address(self._url)} within {timeout_s} s: {reason}")
        attempt.result()
        self._is_started = True
        self._outbox.start()
        await self._subscribe(f"{self._inbox}.*", self._take_reply)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Takes no more messages, lets handlers finish, sends what waits; all of it within ``timeout_s``."""
        if self._is_closing or not self._is_started:
            return
        try:
            async with asyncio.timeout(timeout_s):
                if self.is_connected:
                    # The inbox, which is first, stays: handlers that finish may still be waiting for replies.
                    for subscription in self._subscriptions[1:]:
                        await subscription.drain()  # type: ignore[no-untyped-call]
                    for served in self._served:
                        await served.wait_idle()
                    await self.flush()
        except (TimeoutError, NatsError, BusError) as exc:
            log.warning("bus_close_incomplete", extra={"error": str(exc), "outgoing": len(self._outbox)})
        self._is_closing = True
        for served in self._served:
            served.cancel()
        await self._outbox.stop()
        self._fail_calls("the bus was closed")
        try:
            await self._client.close()
        except (RuntimeError, OSError) as exc:
            # uvloop's answer to writing the last bytes into a connection that is already gone.
            log.debug("bus_closed_late", extra={"error": str(exc)})

    async def wait_lost(self) -> None:
        """Raises BusUnavailable when the connection has ended for good; otherwise never returns."""
        if self._lost is None:
            raise BusUnavailable("not connected yet")
        await asyncio.shield(self._lost)

    async def call(
        self, subject: str, message: msgspec.Struct, reply_type: type[Reply], timeout_s: float
    ) -> Reply:
        """The reply to ``message``.

        Raises the RequestError that the other side raised; BusTimeout; NoResponder (nobody serves the
        subject); BusUnavailable (not connected, or the connection was lost meanwhile: the message may or
        may not have arrived); MessageTooLarge.
        """
        if not self.is_connected:
            raise BusUnavailable(f"{subject}: not connected")
        self._calls_made += 1
        token = str(self._calls_made)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Msg] = loop.create_future()
        self._calls[token] = future
        timer = loop.call_later(timeout_s, _expire, future, subject, timeout_s)
        try:
            self._put(Outgoing(subject, f"{self._inbox}.{token}", _encode(message), is_call=True))
            answer = await future
        finally:
            timer.cancel()
            del self._calls[token]
        if answer.headers and answer.headers.get("Status") == "503":
            raise NoResponder(f"{subject}: nobody serves it")
        return self._read_reply(subject, answer.data, reply_type)

    async def serve(
        self,
        subject: str,
        kind: MessageTypes,
        handler: Handler,
        *,
        queue: str = "",
        max_concurrent: int = 256,
    ) -> None:
        """Answers calls to ``subject``, each in its own task; returns when the subscription is active.

        ``queue`` names a group of which one member answers. Raises BusError (no permission).
        """
        served = ServedSubject(
            subject,
            _decoder(kind),
            handler,
            self._send_reply,
            self._count_malformed,
            max_concurrent,
            WAITING_CALLS,
        )
        self._served.append(served)

        async def take(message: Msg) -> None:
            served.take(message.reply, message.data)

        await self._subscribe(subject, take, queue)

    async def subscribe(self, subject: str, kind: MessageTypes, callback: Callback) -> None:
        """Calls ``callback`` with every message, in order; returns when the subscription is active.

        Malformed messages are counted and dropped. Raises BusError (no permission).
        """
        decode = _decoder(kind).decode

        async def take(message: Msg) -> None:
            try:
                decoded = decode(message.data)
            except (msgspec.DecodeError, RecursionError) as exc:
                self._count_malformed(subject, exc)
                return
            try:
                callback(decoded)
            except Exception:
                self.counters.callback_failures += 1
                log.exception("bus_callback_failed", extra={"subject": subject})

        await self._subscribe(subject, take)

    def publish(self, subject: str, message: msgspec.Struct) -> None:
        """Sends and forgets. Raises BusUnavailable when the outbox is full or closed, MessageTooLarge."""
        self._put(Outgoing(subject, "", _encode(message), is_call=False))

    async def flush(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Returns when the server has everything published so far. Raises BusTimeout, BusUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._outbox.wait_empty()
                await self._barrier()
        except TimeoutError as exc:
            raise BusTimeout(f"flush: not sent within {timeout_s} s") from exc
        except NatsError as exc:
            raise BusUnavailable(f"flush: {exc}") from exc

    # sending

    def _put(self, message: Outgoing) -> None:
        size = len(message.payload)
        if size > self._client.max_payload:
            raise MessageTooLarge(f"{message.subject}: {size} bytes, the limit is {self._client.max_payload}")
        if not self._outbox.try_put(message):
            self.counters.dropped += 1
            raise BusUnavailable(f"{message.subject}: the outbox is full or closed")

    async def _send(self, message: Outgoing) -> bool:
        try:
            await self._client.publish(message.subject, message.payload, message.reply_to)
        except (OutboundBufferLimitError, ConnectionClosedError):
            # The connection is gone and its callback has not run yet.
            return False
        except NatsError as exc:
            self.counters.dropped += 1
            log.warning("bus_publish_refused", extra={"subject": message.subject, "error": str(exc)})
        return True

    def _send_reply(self, reply_to: str, reply: msgspec.Struct) -> None:
        if not reply_to:
            return
        try:
            self._put(Outgoing(reply_to, "", _encode(reply), is_call=False))
        except BusError as exc:
            log.warning("bus_reply_unsent", extra={"error": str(exc)})

    # receiving

    async def _subscribe(
        self, subject: str, take: Callable[[Msg], Coroutine[Any, Any, None]], queue: str = ""
    ) -> None:
        self._violation = None
        try:
            subscription = await self._client.subscribe(
                subject,
                queue=queue,
                cb=take,
                pending_msgs_limit=SUBSCRIPTION_MESSAGES,
                pending_bytes_limit=SUBSCRIPTION_BYTES,
            )
            await self._barrier()
        except (NatsError, OSError, TimeoutError) as exc:
            raise BusUnavailable(f"subscribe {subject}: {exc or 'no answer'}") from exc
        if self._violation is not None:
            raise BusError(f"subscribe {subject}: {self._violation}")
        self._subscriptions.append(subscription)

    async def _barrier(self) -> None:
        """Returns when the server has handled everything written before.

        Twice, since the first round trip's PING overtakes commands that are still in the client's buffer.
        """
        await self._round_trip()
        await self._round_trip()

    async def _round_trip(self) -> None:
        """nats-py's flush in a task of its own, which only the end of the connection cancels.

        A flush that is cancelled or runs out of time leaves its PONG behind, and that PONG, when it comes,
        ends nats-py's read loop.
        """
        flush = asyncio.create_task(self._client.flush(ROUND_TRIP_LIMIT_S))
        self._round_trips.add(flush)
        flush.add_done_callback(self._end_round_trip)
        async with asyncio.timeout(BARRIER_TIMEOUT_S):
            await asyncio.wait({flush})
        if flush.cancelled():
            raise BusUnavailable("the connection to NATS was lost")
        flush.result()

    def _end_round_trip(self, flush: asyncio.Task[None]) -> None:
        self._round_trips.discard(flush)
        if not flush.cancelled():
            # Whoever still waits sees it; who was cancelled has gone.
            flush.exception()

    async def _take_reply(self, message: Msg) -> None:
        future = self._calls.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    def _read_reply(self, subject: str, payload: bytes, reply_type: type[Reply]) -> Reply:
        try:
            reply = _decoder(reply_type | ErrorReply).decode(payload)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._count_malformed(subject, exc)
            raise BusError(f"{subject}: the reply is no {reply_type.__name__}: {exc}") from exc
        if isinstance(reply, ErrorReply):
            raise as_request_error(reply)
        assert isinstance(reply, reply_type)
        return reply

    def _count_malformed(self, subject: str, error: Exception) -> None:
        self.counters.malformed += 1
        log.warning("bus_malformed_message", extra={"subject": subject, "error": str(error)})

    # the connection's life

    async def _connect_client(self) -> None:
        await self._client.connect(
            self._url,
            name=self._name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_to_server_handler=_choose_server,
            connect_timeout=SERVER_CONNECT_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=2,
            pending_size=CLIENT_BUFFER_BYTES,
            # A process may host both rooms, and then calls itself.
            no_echo=False,
        )

    async def _on_error(self, error: Exception) -> None:
        """nats-py reports here what it does not raise; its default logs a traceback for every try."""
        self._last_error = str(error) or type(error).__name__
        lower = self._last_error.lower()
        if isinstance(error, SlowConsumerError):
            self.counters.slow_consumer += 1
            log.warning("bus_slow_consumer", extra={"subject": error.subject})
            _run_hooks(self.on_loss)
        elif "permissions violation" in lower:
            self._violation = self._last_error
            log.error("bus_permission_denied", extra={"error": self._last_error})
        elif "authorization" in lower:
            self._lose(f"NATS at {_address(self._url)}: {self._last_error}")

    async def _on_disconnected(self) -> None:
        if not self._is_started or self._is_closing:
            return
        self._outbox.hold()
        self._fail_calls("the connection to NATS was lost")
        log.warning("bus_disconnected", extra={"error": self._last_error})
        _run_hooks(self.on_disconnect)

    async def _on_reconnected(self) -> None:
        self._outbox.resume()
        self.counters.reconnects += 1
        log.info("bus_reconnected", extra={"reconnects": self.counters.reconnects})
        _run_hooks(self.on_reconnect)

    async def _on_closed(self) -> None:
        if self._is_started:
            self._lose(f"NATS at {_address(self._url)} closed the connection for good: {self._last_error}")

    def _lose(self, reason: str) -> None:
        if self._lost is not None and not self._lost.done() and not self._is_closing:
            self._lost.set_exception(BusUnavailable(reason))
            # Whoever waits gets it; nobody has to.
            self._lost.exception()

    def _fail_calls(self, reason: str) -> None:
        for flush in self._round_trips:
            flush.cancel()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(BusUnavailable(reason))


def _expire(future: asyncio.Future[Msg], subject: str, timeout_s: float) -> None:
    if not future.done():
        future.set_exception(BusTimeout(f"{subject}: no reply within {timeout_s} s"))


def _run_hooks(hooks: list[Callable[[], None]]) -> None:
    for hook in hooks:
        try:
            hook()
        except Exception:
            log.exception("bus_hook_failed")


def _choose_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The next server and a jittered wait, so that a restarted NATS does not meet everyone at once."""
    return servers[0], RECONNECT_WAIT_S * random.uniform(0.5, 1.5)


def _address(url: str) -> str:
    """The URL without its credentials, for logs and errors."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 4222}"
