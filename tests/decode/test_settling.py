"""A quarantine ends with the sender's word or its process, over a real bus and real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.errors import BusError, InternalError, Overloaded, UnknownRequest
from common.messages import HostProcess
from common.transfer.buffers import host_identity
from decode import settling
from tests.common.buses import Answer, Question, connected, run

SUBJECT = "settling"


@pytest.fixture
def sender() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def test_only_the_transfers_own_word_counts(nats_url: str, namespace: str) -> None:
    """A bus that has no room, and a handler that broke, know nothing of what is in the air."""
    errors = [Overloaded("no room"), InternalError("broken"), UnknownRequest("nothing is in the air")]
    asked: list[str] = []

    async def answer(question: Question) -> Answer:
        asked.append(question.text)
        raise errors[len(asked) - 1]

    async def settle() -> None:
        async with connected(nats_url, namespace) as bus:
            await bus.serve(SUBJECT, Question, answer)
            here = HostProcess(host_identity(), os.getpid())
            await settling.wait_settled(here, lambda: bus.call(SUBJECT, Question("?"), Answer, 5.0))

    run(settle())
    assert asked == ["?"] * 3


def test_a_stopped_sender_of_this_host_is_waited_for_until_it_has_ended(
    nats_url: str, namespace: str, sender: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody serves the subject, no time ends it: only the kernel does, even of one that is stopped."""
    monkeypatch.setattr(settling, "FAR_SENDER_SETTLES_S", 0.0)
    monkeypatch.setattr(settling, "RECONNECT_BACKOFF_S", 0.0)
    os.kill(sender.pid, signal.SIGSTOP)

    async def settle() -> None:
        async with connected(nats_url, namespace) as bus:
            tries = asyncio.Semaphore(0)

            async def ask() -> None:
                try:
                    await bus.call(SUBJECT, Question("?"), Answer, 5.0)
                except BusError:
                    tries.release()
                    raise

            here = HostProcess(host_identity(), sender.pid)
            settled = asyncio.create_task(settling.wait_settled(here, ask))
            for _ in range(5):
                await tries.acquire()
            assert not settled.done()
            sender.kill()
            await settled
            for far in (HostProcess("another host", sender.pid), None):
                await settling.wait_settled(far, ask)

    run(settle())
    assert sender.wait() == -signal.SIGKILL


def test_a_process_counts_as_ended_before_and_after_somebody_has_collected_it(
    sender: subprocess.Popen[bytes],
) -> None:
    assert not settling.has_ended(sender.pid)
    sender.kill()
    os.waitid(os.P_PID, sender.pid, os.WEXITED | os.WNOWAIT)
    assert settling.has_ended(sender.pid)
    sender.wait()
    assert settling.has_ended(sender.pid)
