"""The bus and its server: refusals, loss, restart, hanging; and what waits to be sent meanwhile."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from common.bus import Bus
from common.errors import (
    BusError,
    BusUnavailable,
)
from common.outbox import Outbox, Outgoing
from common.subjects import Subjects
from services.launcher import embedded
from tests.common.buses import WAIT_S, Answer, Question, connected, echo, pair, run, until


def test_a_server_that_is_not_there_is_named_without_credentials() -> None:
    async def work() -> None:
        bus = Bus("nats://topsecret@127.0.0.1:1", name="a", subjects=Subjects("n"))
        with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1") as caught:
            await bus.connect(timeout_s=0.3)
        assert "topsecret" not in str(caught.value)

    run(work())


def test_refused_credentials_end_the_attempt(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        address = nats_url.rpartition("@")[2]
        bus = Bus(f"nats://wrong@{address}", name="a", subjects=Subjects(namespace))
        with pytest.raises(BusUnavailable, match=r"(?i)authorization"):
            await bus.connect(timeout_s=3600)

    run(work())


def test_a_forbidden_subject_is_an_error_at_start(tmp_path: Path) -> None:
    server = embedded.prepare_nats(tmp_path)
    config = tmp_path / "nats.conf"
    users = '{user: u, password: p, permissions: {subscribe: ["ok.>", "_INBOX.>"], publish: ["ok.>"]}}'
    text = config.read_text().splitlines()
    text = [f"authorization {{ users: [{users}] }}" if "authorization" in line else line for line in text]
    config.write_text("\n".join(text))
    process = embedded.start(
        replace(server, probe=b'CONNECT {"user":"u","pass":"p","verbose":false}\r\nPING\r\n')
    )

    async def work() -> None:
        async with connected(f"nats://u:p@127.0.0.1:{server.port}", "n") as bus:
            await bus.subscribe("ok.x", Question, print)
            with pytest.raises(BusError, match=r"(?i)permission"):
                await bus.subscribe("forbidden.x", Question, print)

    try:
        run(work())
    finally:
        embedded.stop(process)


def test_a_lost_server_fails_calls_at_once_and_a_new_one_is_used_again(tmp_path: Path) -> None:
    server = embedded.prepare_nats(tmp_path)
    process = embedded.start(server)

    async def work() -> None:
        nonlocal process
        gate = asyncio.Event()
        hooks: list[str] = []
        heard: list[str] = []
        is_back = asyncio.Event()

        async def wait(question: Question) -> Answer:
            await gate.wait()
            return Answer("late")

        async with pair(server.url, "n") as (client, peer):
            client.on_disconnect.append(lambda: hooks.append("down"))
            client.on_reconnect.append(lambda: hooks.append("up"))
            client.on_reconnect.append(is_back.set)
            peer_is_back = asyncio.Event()
            peer.on_reconnect.append(peer_is_back.set)
            await peer.serve("n.x", Question, wait)
            await peer.serve("n.echo", Question, echo)
            await peer.subscribe("n.events", Question, lambda q: heard.append(q.text))
            call = asyncio.create_task(client.call("n.x", Question(""), Answer, timeout_s=3600))
            await client.call("n.echo", Question(""), Answer, WAIT_S)
            process.kill()
            process.wait()
            with pytest.raises(BusUnavailable, match="lost"):
                await call
            assert not client.is_connected
            with pytest.raises(BusUnavailable, match="not connected"):
                await client.call("n.echo", Question(""), Answer, WAIT_S)
            client.publish("n.events", Question("while away"))
            process = embedded.start(server)
            await is_back.wait()
            await peer_is_back.wait()
            assert hooks == ["down", "up"]
            assert client.counters.reconnects == 1
            assert (await client.call("n.echo", Question("again"), Answer, WAIT_S)).text == "again"
            client.publish("n.events", Question("after"))
            await until(lambda: "after" in heard, peer)
            gate.set()

    try:
        run(work())
    finally:
        embedded.stop(process)


def test_a_server_that_hangs_is_noticed_by_pings(tmp_path: Path) -> None:
    server = embedded.prepare_nats(tmp_path)
    process = embedded.start(server)

    async def work() -> None:
        async with connected(server.url, "n") as bus:
            os.kill(process.pid, signal.SIGSTOP)
            _wait_stopped(process.pid)
            try:
                with pytest.raises(BusUnavailable, match="lost"):
                    await bus.call("n.x", Question(""), Answer, timeout_s=3600)
            finally:
                os.kill(process.pid, signal.SIGCONT)

    try:
        run(work())
    finally:
        embedded.stop(process)


def test_the_outbox_forgets_calls_when_held_and_keeps_the_order_of_the_rest() -> None:
    async def work() -> None:
        sent: list[str] = []
        is_up = True

        async def send(message: Outgoing) -> bool:
            if is_up:
                sent.append(message.subject)
            return is_up

        outbox = Outbox(send, max_bytes=10)
        assert not outbox.try_put(Outgoing("x", "", b"1", is_call=False))
        outbox.start()
        outbox.hold()
        assert outbox.try_put(Outgoing("a", "", b"123", is_call=False))
        assert outbox.try_put(Outgoing("call", "r", b"123", is_call=True))
        assert outbox.try_put(Outgoing("b", "", b"123", is_call=False))
        assert not outbox.try_put(Outgoing("c", "", b"12", is_call=False))
        outbox.hold()
        assert len(outbox) == 2
        outbox.resume()
        await outbox.wait_empty()
        assert sent == ["a", "b"]
        await outbox.stop()

    run(work())


def _wait_stopped(pid: int) -> None:
    """Every thread of it: one that still runs would answer."""
    tasks = Path(f"/proc/{pid}/task")
    while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in tasks.glob("*/stat")):
        time.sleep(0.001)
