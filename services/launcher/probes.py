"""How one process asks others whether they are ready; they cannot tell by themselves."""

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from common.errors import LauncherError
from common.service_classes import PROBE_HEADER

READY_TIMEOUT_S = 300.0
"""Loading the largest model from a slow disk; a service that fails says so at once."""
READY_INTERVAL_S = 0.05
PROBE_TIMEOUT_S = 2.0


async def until(check: Callable[[], Awaitable[bool]], what: str) -> None:
    """Asks other processes, which cannot tell by themselves, until it is so."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                if await check():
                    return
                await asyncio.sleep(READY_INTERVAL_S)
    except TimeoutError:
        raise LauncherError(f"waited {READY_TIMEOUT_S} s for {what}") from None


async def fetch(
    url: str, body: bytes | None = None, timeout_s: float = PROBE_TIMEOUT_S, key: str | None = None
) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of JSON, with that key; status 0 when nobody answers in time."""
    parts = urlsplit(url)
    lines = [f"{'GET' if body is None else 'POST'} {parts.path} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body or b'')}", "Connection: close"]
    lines.append(f"{PROBE_HEADER}: 1")
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
                head, _, received = (await reader.read()).partition(b"\r\n\r\n")
                return int(head.split(b" ", 2)[1]), received
            finally:
                writer.close()
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0, b""
