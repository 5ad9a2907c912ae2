"""The control plane's bus: calls, served subjects, subscriptions and publishes over NATS.

What its users may rely on:

- A subscription is active on the server when ``serve`` or ``subscribe`` returns.
- A call in flight fails the moment the connection is lost; it does not wait for its own deadline.
- An exception in a handler always reaches the caller, as an ErrorReply; one in a callback is logged and
  counted.
- Everything leaves through one outbox, so order is kept. The outbox is bounded and full is BusUnavailable.
- Lost messages (slow consumer, no room) are counted. Receivers notice them by the indexes in the messages.

NATS carries decisions and tokens; never KV, activations or a step's critical path.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, overload

import msgspec

from common.errors import BusError, BusTimeout, BusUnavailable, MessageTooLarge, NoResponder
from common.messages import ErrorReply, as_request_error
from common.nats_connection import BARRIER_TIMEOUT_S, Message, NatsConnection, has_no_responder
from common.outbox import Outbox, Outgoing
from common.served import Handler, ServedSubject
from common.spans import traceparent_of
from common.subjects import Subjects

log = logging.getLogger("lamella.bus")

Reply = TypeVar("Reply", bound=msgspec.Struct)
MessageTypes = type[msgspec.Struct] | UnionType
"""A message type, or a union of tagged ones."""
Callback = Callable[[Any], None]
"""Takes one decoded message. It must not block: it puts the message where it belongs."""

OUTBOX_BYTES = 2 << 20
"""Twice the largest message."""
WAITING_CALLS = 1024
"""Calls of one served subject that may wait while ``max_concurrent`` are being answered."""
CLOSE_TIMEOUT_S = 10.0

_encode = msgspec.msgpack.Encoder().encode


def _named(types: MessageTypes) -> str:
    return " or ".join(each.__name__ for each in (get_args(types) or (types,)))


@cache
def _decoder(kind: MessageTypes) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


class Bus:
    """One connection to NATS. ``on_reconnect``, ``on_disconnect`` and ``on_loss`` (messages to here were
    dropped) are called on the event loop.

    ``name`` is the service's id; it names the connection and the inbox, so that NATS permissions can keep
    services out of each other's replies. The URL may hold ``user:password@`` or ``token@``.
    """

    def __init__(self, url: str, *, name: str, subjects: Subjects) -> None:
        self._connection = NatsConnection(url, name)
        self.counters = self._connection.counters
        self.on_reconnect = self._connection.on_reconnect
        self.on_loss = self._connection.on_loss
        self.on_disconnect = self._connection.on_disconnect
        self._inbox = f"_INBOX.{subjects.namespace}.{name}.{secrets.token_hex(8)}"
        self._outbox = Outbox(self._connection.send, OUTBOX_BYTES)
        self._calls: dict[str, asyncio.Future[Message]] = {}
        self._calls_made = 0
        self._served: list[ServedSubject] = []
        self.on_reconnect.append(self._outbox.resume)
        self.on_disconnect.append(self._pause)

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    @property
    def max_message_bytes(self) -> int:
        """The server's payload limit, known once connected."""
        return self._connection.max_message_bytes

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Tries until ``timeout_s`` is over. Raises BusUnavailable; refused credentials end it at once."""
        await self._connection.connect(timeout_s)
        self._outbox.start()
        await self._connection.subscribe(f"{self._inbox}.*", self._take_reply)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Takes no more messages, lets handlers finish, sends what waits; all of it within ``timeout_s``."""
        if not self._connection.is_open:
            return
        try:
            async with asyncio.timeout(timeout_s):
                if self.is_connected:
                    # The inbox, which is first, stays: handlers that finish may still be waiting for replies.
                    await self._connection.drain()
                    for served in self._served:
                        await served.wait_idle()
                    await self.flush()
        except (TimeoutError, BusError) as exc:
            log.warning("bus_close_incomplete", extra={"error": str(exc), "outgoing": len(self._outbox)})
        self._connection.begin_end()
        for served in self._served:
            served.cancel()
        await self._outbox.stop()
        self._fail_calls("the bus was closed")
        await self._connection.close()

    async def wait_lost(self) -> None:
        """Raises BusUnavailable when the connection has ended for good; otherwise never returns."""
        await self._connection.wait_lost()

    @overload
    async def call(
        self, subject: str, message: msgspec.Struct, reply_type: type[Reply], timeout_s: float
    ) -> Reply: ...

    @overload
    async def call(
        self, subject: str, message: msgspec.Struct, reply_type: UnionType, timeout_s: float
    ) -> msgspec.Struct: ...

    async def call(
        self, subject: str, message: msgspec.Struct, reply_type: MessageTypes, timeout_s: float
    ) -> msgspec.Struct:
        """The reply to ``message``: one of ``reply_type``.

        Raises the RequestError that the other side raised; BusTimeout; NoResponder (nobody serves the
        subject); BusUnavailable (not connected, or the connection was lost meanwhile: the message may or
        may not have arrived); MessageTooLarge.
        """
        if not self.is_connected:
            raise BusUnavailable(f"{subject}: not connected")
        self._calls_made += 1
        token = str(self._calls_made)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        self._calls[token] = future
        timer = loop.call_later(timeout_s, _expire, future, subject, timeout_s)
        try:
            self._put(
                Outgoing(subject, f"{self._inbox}.{token}", _encode(message), True, traceparent_of(message))
            )
            answer = await future
        finally:
            timer.cancel()
            del self._calls[token]
        if has_no_responder(answer):
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
        max_waiting: int = WAITING_CALLS,
    ) -> None:
        """Answers calls to ``subject``, each in its own task; returns when the subscription is active.

        ``queue`` names a group of which one member answers. Calls over ``max_waiting`` are answered with
        Overloaded. Raises BusError (no permission).
        """
        served = ServedSubject(
            subject,
            _decoder(kind),
            handler,
            self._send_reply,
            self._count_malformed,
            max_concurrent,
            max_waiting,
        )
        self._served.append(served)

        async def take(message: Message) -> None:
            served.take(message.reply, message.data)

        await self._connection.subscribe(subject, take, queue)

    async def subscribe(self, subject: str, kind: MessageTypes, callback: Callback) -> None:
        """Calls ``callback`` with every message, in order; returns when the subscription is active.

        Malformed messages are counted and dropped. Raises BusError (no permission).
        """
        decode = _decoder(kind).decode

        async def take(message: Message) -> None:
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

        await self._connection.subscribe(subject, take)

    def publish(self, subject: str, message: msgspec.Struct) -> None:
        """Sends and forgets. Raises BusUnavailable when the outbox is full or closed, MessageTooLarge."""
        self._put(Outgoing(subject, "", _encode(message), is_call=False))

    async def flush(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Returns when the server has everything published so far. Raises BusTimeout, BusUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._outbox.wait_empty()
                await self._connection.barrier()
        except TimeoutError as exc:
            raise BusTimeout(f"flush: not sent within {timeout_s} s") from exc

    # sending

    def _put(self, message: Outgoing) -> None:
        size = len(message.payload)
        if size > self.max_message_bytes:
            raise MessageTooLarge(f"{message.subject}: {size} bytes, the limit is {self.max_message_bytes}")
        if not self._outbox.try_put(message):
            self.counters.dropped += 1
            raise BusUnavailable(f"{message.subject}: the outbox is full or closed")

    def _send_reply(self, reply_to: str, reply: msgspec.Struct) -> None:
        if not reply_to:
            return
        try:
            self._put(Outgoing(reply_to, "", _encode(reply), is_call=False))
        except BusError as exc:
            log.warning("bus_reply_unsent", extra={"error": str(exc)})

    # receiving

    async def _take_reply(self, message: Message) -> None:
        future = self._calls.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    def _read_reply(self, subject: str, payload: bytes, reply_type: MessageTypes) -> msgspec.Struct:
        try:
            reply = _decoder(reply_type | ErrorReply).decode(payload)
        except (msgspec.DecodeError, RecursionError) as exc:
            self._count_malformed(subject, exc)
            raise BusError(f"{subject}: the reply is no {_named(reply_type)}: {exc}") from exc
        if isinstance(reply, ErrorReply):
            raise as_request_error(reply)
        assert isinstance(reply, reply_type)
        return reply

    def _count_malformed(self, subject: str, error: Exception) -> None:
        self.counters.malformed += 1
        log.warning("bus_malformed_message", extra={"subject": subject, "error": str(error)})

    def _pause(self) -> None:
        self._outbox.hold()
        self._fail_calls("the connection to NATS was lost")

    def _fail_calls(self, reason: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(BusUnavailable(reason))


def _expire(future: asyncio.Future[Message], subject: str, timeout_s: float) -> None:
    if not future.done():
        future.set_exception(BusTimeout(f"{subject}: no reply within {timeout_s} s"))
