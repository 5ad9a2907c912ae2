"""One connection to NATS: its life, its barrier, its errors.

The only importer of nats; ``common.bus`` makes calls and subscriptions of it. What nats-py leaves to its
user is settled here once:

- One flush is no barrier, because its PING overtakes what is still buffered; and a flush that is given up
  leaves a PONG behind that ends nats-py's read loop.
- Exceptions come to one callback only, refused permissions among them; slow consumers drop silently.
- A lost connection is tried again for ever, which a supervisor must be able to tell from one that is refused.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, OutboundBufferLimitError, SlowConsumerError
from nats.errors import Error as NatsError

from common.cancellation import cancel_and_wait
from common.errors import BusError, BusUnavailable
from common.outbox import Outgoing
from common.spans import TRACEPARENT

log = logging.getLogger("lamella.bus")

Message = Msg
"""One message as it came."""
Take = Callable[[Message], Coroutine[Any, Any, None]]
Hook = Callable[[], None]

CLIENT_BUFFER_BYTES = 256 << 10
"""nats-py's own buffer. Small, since after an outage stale tokens are better resumed than replayed."""
SUBSCRIPTION_MESSAGES = 65_536
SUBSCRIPTION_BYTES = 64 << 20
RECONNECT_WAIT_S = 0.1
SERVER_CONNECT_TIMEOUT_S = 1
PING_INTERVAL_S = 2
BARRIER_TIMEOUT_S = 5.0
ROUND_TRIP_LIMIT_S = 3600
"""Longer than any connection that does not answer pings."""


@dataclass(slots=True)
class BusCounters:
    """Totals since the process started."""

    reconnects: int = 0
    slow_consumer: int = 0
    dropped: int = 0
    malformed: int = 0
    callback_failures: int = 0


class NatsConnection:
    """``on_reconnect``, ``on_disconnect`` and ``on_loss`` (messages to here were dropped) are called on the
    event loop, in order.

    ``name`` names the connection. The URL may hold ``user:password@`` or ``token@``.
    """

    def __init__(self, url: str, name: str) -> None:
        self.counters = BusCounters()
        self.on_reconnect: list[Hook] = []
        self.on_loss: list[Hook] = []
        self.on_disconnect: list[Hook] = []
        self._url = url
        self._name = name
        self._client = Client()
        self._lost: asyncio.Future[None] | None = None
        self._is_started = False
        self._is_ending = False
        self._last_error = ""
        self._violation: str | None = None
        self._round_trips: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []

    @property
    def is_connected(self) -> bool:
        return self.is_open and self._client.is_connected

    @property
    def is_open(self) -> bool:
        """It was connected once, and its end has not begun."""
        return self._is_started and not self._is_ending

    @property
    def max_message_bytes(self) -> int:
        """The server's payload limit, known once connected."""
        return self._client.max_payload

    async def connect(self, timeout_s: float) -> None:
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

    async def wait_lost(self) -> None:
        """Raises BusUnavailable when the connection has ended for good; otherwise never returns."""
        if self._lost is None:
            raise BusUnavailable("not connected yet")
        await asyncio.shield(self._lost)

    async def subscribe(self, subject: str, take: Take, queue: str = "") -> None:
        """Returns when the subscription is active. Raises BusUnavailable, BusError (no permission)."""
        self._violation = None
        try:
            subscription = await self._client.subscribe(
                subject,
                queue=queue,
                cb=take,
                pending_msgs_limit=SUBSCRIPTION_MESSAGES,
                pending_bytes_limit=SUBSCRIPTION_BYTES,
            )
            await self.barrier()
        except (NatsError, BusUnavailable, OSError, TimeoutError) as exc:
            raise BusUnavailable(f"subscribe {subject}: {exc or 'no answer'}") from exc
        if self._violation is not None:
            raise BusError(f"subscribe {subject}: {self._violation}")
        self._subscriptions.append(subscription)

    async def send(self, message: Outgoing) -> bool:
        """Whether the message is dealt with: given to nats-py, or refused for good. False: not now."""
        headers = None if message.traceparent is None else {TRACEPARENT: message.traceparent}
        try:
            await self._client.publish(message.subject, message.payload, message.reply_to, headers)
        except (OutboundBufferLimitError, ConnectionClosedError):
            # The connection is gone and its callback has not run yet.
            return False
        except NatsError as exc:
            self.counters.dropped += 1
            log.warning("bus_publish_refused", extra={"subject": message.subject, "error": str(exc)})
        return True

    async def barrier(self) -> None:
        """Returns when the server has handled everything written before. Raises TimeoutError, BusUnavailable.

        Twice, since the first round trip's PING overtakes commands that are still in the client's buffer.
        """
        await self._round_trip()
        await self._round_trip()

    async def drain(self) -> None:
        """Takes no more messages, but for the first subscription's. Raises BusUnavailable."""
        for subscription in self._subscriptions[1:]:
            try:
                await subscription.drain()  # type: ignore[no-untyped-call]
            except NatsError as exc:
                raise BusUnavailable(f"drain: {exc}") from exc

    def begin_end(self) -> None:
        """From now on it counts as not connected, and losing it is no loss."""
        self._is_ending = True

    async def close(self) -> None:
        self.begin_end()
        self.give_up_round_trips()
        try:
            await self._client.close()
        except (RuntimeError, OSError) as exc:
            # uvloop's answer to writing the last bytes into a connection that is already gone.
            log.debug("bus_closed_late", extra={"error": str(exc)})

    def give_up_round_trips(self) -> None:
        for flush in self._round_trips:
            flush.cancel()

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
        try:
            flush.result()
        except NatsError as exc:
            raise BusUnavailable(str(exc)) from exc

    def _end_round_trip(self, flush: asyncio.Task[None]) -> None:
        self._round_trips.discard(flush)
        if not flush.cancelled():
            # Whoever still waits sees it; who was cancelled has gone.
            flush.exception()

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

    # what nats-py tells

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
        if not self.is_open:
            return
        self.give_up_round_trips()
        log.warning("bus_disconnected", extra={"error": self._last_error})
        _run_hooks(self.on_disconnect)

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        log.info("bus_reconnected", extra={"reconnects": self.counters.reconnects})
        _run_hooks(self.on_reconnect)

    async def _on_closed(self) -> None:
        if self._is_started:
            self._lose(f"NATS at {_address(self._url)} closed the connection for good: {self._last_error}")

    def _lose(self, reason: str) -> None:
        if self._lost is not None and not self._lost.done() and not self._is_ending:
            self._lost.set_exception(BusUnavailable(reason))
            # Whoever waits gets it; nobody has to.
            self._lost.exception()


def has_no_responder(message: Message) -> bool:
    """Whether this reply is the server's own: nobody serves the subject."""
    return message.headers is not None and message.headers.get("Status") == "503"


def _run_hooks(hooks: list[Hook]) -> None:
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
