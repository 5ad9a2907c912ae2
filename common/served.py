"""How a served subject is answered: each call in its own task, a bounded number at a time.

Invariant: every call is answered exactly once, by the handler's reply or by an ErrorReply, whatever the
handler or the message did; only a process that dies leaves a caller to its timeout. Knows nothing of NATS.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import InternalError, InvalidRequest, Overloaded, RequestError
from common.logs import request_field
from common.messages import ErrorReply, error_reply

log = logging.getLogger("lamella.bus")

Handler = Callable[[Any], Coroutine[Any, Any, msgspec.Struct]]
"""Answers one call. A RequestError travels to the caller; anything else becomes InternalError."""
SendReply = Callable[[str, msgspec.Struct], None]

OVERLOADED_RETRY_S = 1.0


@dataclass(slots=True)
class ServedSubject:
    """At most ``max_concurrent`` handlers run and ``max_waiting`` calls wait; more are Overloaded."""

    subject: str
    decoder: msgspec.msgpack.Decoder[Any]
    handler: Handler
    send_reply: SendReply
    on_malformed: Callable[[str, Exception], None]
    max_concurrent: int
    max_waiting: int
    _slots: asyncio.Semaphore = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_concurrent)

    def take(self, reply_to: str, payload: bytes) -> None:
        """Starts to answer one call; does not wait."""
        if len(self._tasks) >= self.max_concurrent + self.max_waiting:
            error = Overloaded(
                f"{len(self._tasks)} calls are being answered", retry_after_s=OVERLOADED_RETRY_S
            )
            self.send_reply(reply_to, error_reply(error))
            return
        task = asyncio.create_task(self._answer(reply_to, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_idle(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _answer(self, reply_to: str, payload: bytes) -> None:
        try:
            message = self.decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as exc:
            self.on_malformed(self.subject, exc)
            reply: msgspec.Struct = error_reply(InvalidRequest(f"malformed message: {exc}"))
        else:
            reply = await self._handle(message)
        self.send_reply(reply_to, reply)

    async def _handle(self, message: object) -> msgspec.Struct:
        try:
            async with self._slots:
                return await self.handler(message)
        except RequestError as exc:
            return error_reply(exc)
        except Exception:
            log.exception("bus_handler_failed", extra={"subject": self.subject, **request_field(message)})
            return ErrorReply(InternalError.code, "an internal error; the service's log has it")
