"""What ends a command: signals that come at any time, sent to this very process."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import uvloop

from common.signals import heeded, run_until_signal

WAIT_S = 20.0
SIGNALS = signal.SIGTERM, signal.SIGHUP


def _raise(number: int, frame: FrameType | None) -> None:
    raise AssertionError("a signal that was to be answered by the loop")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, _raise) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _SignalsItself(asyncio.Protocol):
    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def data_received(self, data: bytes) -> None:
        os.kill(os.getpid(), self._number)


async def _hear_from_itself(number: signal.Signals, ended: list[str]) -> None:
    """A connection's callback is interrupted, as of a client whose answers come all the time."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _SignalsItself(number), "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"now")
        await asyncio.sleep(WAIT_S)
        ended.append("nobody")
    finally:
        server.close()
        ended.append("closed")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_amid_a_connections_callback_ends_all_and_not_that_connection(
    number: signal.Signals,
) -> None:
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_until_signal(_hear_from_itself(number, ended))
    assert ended == ["closed"]
    assert [signal.getsignal(each) for each in SIGNALS] == [_raise, _raise]


@pytest.mark.parametrize("ends_by", ["answer", "error", "swallowing"])
def test_a_signal_is_not_lost_whatever_it_ended_with(ends_by: str) -> None:
    async def end() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        if ends_by == "error":
            raise ValueError(ends_by)
        if ends_by == "swallowing":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(WAIT_S)
        return 7

    with pytest.raises(KeyboardInterrupt):
        run_until_signal(end())


def test_a_signal_before_anything_runs_ends_it_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    run = uvloop.run

    def signalled(main: Coroutine[Any, Any, None]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        run(main)

    async def wait() -> None:
        await asyncio.sleep(WAIT_S)
        ended.append("late")

    monkeypatch.setattr(uvloop, "run", signalled)
    with pytest.raises(KeyboardInterrupt):
        run_until_signal(wait())
    assert ended == []


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(WAIT_S)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.02)
            ended.append("whole")

    with pytest.raises(KeyboardInterrupt):
        run_until_signal(wait())
    assert ended == ["whole"]


def test_what_ends_by_itself_is_answered_and_what_is_cancelled_otherwise_is_no_interrupt() -> None:
    async def seven() -> int:
        return 7

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert run_until_signal(seven()) == 7
    with pytest.raises(asyncio.CancelledError):
        run_until_signal(cancelled())
    assert signal.getsignal(signal.SIGTERM) is _raise


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def hang_up() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        return "went on"

    assert heeded(*SIGNALS) == [signal.SIGTERM]
    assert run_until_signal(hang_up()) == "went on"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
