"""Publishing what must arrive: the last word on a sequence has no successor whose index would show a gap."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

import msgspec

from common.bus import Bus
from common.errors import BusUnavailable
from common.logs import request_field

log = logging.getLogger("lamella.bus")

RETRY_S = 0.5
TRIES = 60


def publish_surely(
    bus: Bus, subject: str, message: msgspec.Struct, spawn: Callable[[Coroutine[None, None, None]], None]
) -> None:
    """Publishes now, or again and again for half a minute where the bus cannot take it.

    Raises MessageTooLarge.
    """
    try:
        bus.publish(subject, message)
    except BusUnavailable as exc:
        facts = {"subject": subject, "error": str(exc), **request_field(message)}
        log.warning("publish_postponed", extra=facts)
        spawn(_publish_later(bus, subject, message))


async def _publish_later(bus: Bus, subject: str, message: msgspec.Struct) -> None:
    for _ in range(TRIES):
        await asyncio.sleep(RETRY_S)
        try:
            bus.publish(subject, message)
        except BusUnavailable:
            continue
        return
    log.error("publish_given_up", extra={"subject": subject, **request_field(message)})
