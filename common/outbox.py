"""What waits to leave a process: a bounded queue and the one task that empties it.

Invariants: messages leave in the order they came; at most ``max_bytes`` wait; a message whose send said
"not now" stays first. Knows nothing of NATS: it is given a way to send.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from common.cancellation import cancel_and_wait, keep_cancellation


class Outgoing(NamedTuple):
    """``is_call``: somebody waits for the reply, so it must not leave after that wait has failed.
    ``traceparent``: goes into the message's header, for whoever traces NATS itself."""

    subject: str
    reply_to: str
    payload: bytes
    is_call: bool
    traceparent: str | None = None


Send = Callable[[Outgoing], Awaitable[bool]]
"""Whether the message is dealt with; False keeps it until ``resume``."""


class Outbox:
    """``start`` begins to send. ``hold`` and ``resume`` follow the connection."""

    def __init__(self, send: Send, max_bytes: int) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._waiting: deque[Outgoing] = deque()
        self._waiting_bytes = 0
        self._is_open = asyncio.Event()
        self._has_messages = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._is_open.set()
        self._task = asyncio.create_task(self._empty(), name="bus-outbox")

    async def stop(self) -> None:
        """Ends the sending; what still waits is dropped."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    def try_put(self, message: Outgoing) -> bool:
        """False when there is no room, or nothing is sent any more."""
        size = len(message.payload)
        if self._task is None or self._task.done() or self._waiting_bytes + size > self._max_bytes:
            return False
        self._waiting.append(message)
        self._waiting_bytes += size
        self._is_empty.clear()
        self._has_messages.set()
        return True

    def hold(self) -> None:
        """The connection is gone: nothing leaves, and calls are forgotten, since their callers are told."""
        self._is_open.clear()
        self._waiting = deque(message for message in self._waiting if not message.is_call)
        self._waiting_bytes = sum(len(message.payload) for message in self._waiting)

    def resume(self) -> None:
        self._is_open.set()

    async def wait_empty(self) -> None:
        await self._is_empty.wait()

    async def _empty(self) -> None:
        while True:
            if not self._waiting:
                self._is_empty.set()
                self._has_messages.clear()
                await self._has_messages.wait()
            await self._is_open.wait()
            while self._waiting and self._is_open.is_set():
                message = self._waiting[0]
                if not await keep_cancellation(self._send(message)):
                    self._is_open.clear()
                # ``hold`` may have forgotten it meanwhile.
                elif self._waiting and self._waiting[0] is message:
                    self._waiting.popleft()
                    self._waiting_bytes -= len(message.payload)
