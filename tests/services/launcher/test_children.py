"""A supervisor's own processes, one at a time."""

import asyncio
import sys
from pathlib import Path

from services.launcher.children import Child

WAIT_S = 30.0
DRAINS = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("started", flush=True)
signal.pause()
time.sleep(0.5)
"""


async def wait_said(child: Child, word: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if child.log_file.exists() and word in child.log_file.read_text():
                return
            await asyncio.sleep(0.01)


async def stop_twice(child: Child) -> None:
    child.turn.set()
    kept = asyncio.create_task(child.keep(lambda: None, lambda: True))
    await wait_said(child, "started")
    first = asyncio.create_task(child.stop(WAIT_S))
    await wait_said(child, "asked")
    await child.stop(WAIT_S)
    await asyncio.gather(first, kept)


def test_two_who_wait_for_the_same_end_ask_for_it_once(tmp_path: Path) -> None:
    """A service that is asked a second time cuts its drain short."""
    log_file = tmp_path / "decode-0.log"
    child = Child("decode-0", "decode", (sys.executable, "-c", DRAINS), {}, log_file)
    asyncio.run(stop_twice(child))
    assert child.state == "stopped"
    assert log_file.read_text().split() == ["started", "asked"]
