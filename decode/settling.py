"""When nothing of a transfer that was given up can land any more: its destination stays reserved until then.

A sender that is stopped goes on writing when it runs again, however late. On this host the kernel says when
its process has ended; across hosts nobody does, and the clock that ends a transfer there is Mooncake's.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from common.errors import BusError, BusTimeout, InternalError, Overloaded, RequestError
from common.messages import HostProcess
from common.transfer.buffers import host_identity
from decode.process_exit import has_exited

log = logging.getLogger("lamella.decode")

RECONNECT_BACKOFF_S = 0.1
"""Between tries while the bus, or who is asked, is away."""
FAR_SENDER_SETTLES_S = 60.0
"""Mooncake gives every slice up within 48 s (``TransferLimits``), be the sender's clock running at all."""


async def wait_settled(sender: HostProcess | None, ask: Callable[[], Awaitable[object]]) -> None:
    """Returns when the sender, or its next life, answers ``ask``, or its process has ended; of one on another
    host, or None, at the latest after ``FAR_SENDER_SETTLES_S``.

    ``ask`` raises BusError where there is no answer, and a RequestError where that is the answer.
    """
    is_here = sender is not None and sender.host == host_identity()
    try:
        async with asyncio.timeout(None if is_here else FAR_SENDER_SETTLES_S):
            while not (is_here and sender is not None and has_ended(sender.pid)):
                try:
                    await ask()
                except BusTimeout:
                    continue
                except (BusError, Overloaded, InternalError):
                    # The last two come from the bus at the other end: the transfer was not asked.
                    await asyncio.sleep(RECONNECT_BACKOFF_S)
                    continue
                except RequestError:
                    return
                return
    except TimeoutError:
        log.warning("sender_never_settled", extra={"sender": str(sender)})


def has_ended(pid: int) -> bool:
    """Whether this host's process has. Its pid in other hands counts as not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return has_exited(pidfd)()
    finally:
        os.close(pidfd)
