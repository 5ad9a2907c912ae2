"""Mooncake's traps, each provoked for real: see the module docstrings of common.transfer.mooncake(_link)."""

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from common.config import TransferConfig
from common.transfer import (
    EngineStartError,
    PeerInfo,
    PeerTimeout,
    PeerUnreachable,
    RegionOverlap,
    Run,
    SharedBuffer,
    StalePeer,
    TransferFailed,
    TransferStalled,
)
from common.transfer.mooncake import MooncakeEngine
from common.transfer.mooncake_link import MooncakeLink
from tests.common.transfer.peer_process import PeerProcess
from tests.common.transfer.writing import KV_BYTES, LIMITS, sending_endpoint, writing

WHOLE = Run("kv", 0, "kv", 0, KV_BYTES)


def test_slices_in_flight_never_exceed_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 2,000 outstanding slices wedge a peer for good."""
    most = 0
    poll = MooncakeLink._poll

    def watched_poll(link: MooncakeLink, turn_ends_s: float) -> int:
        nonlocal most
        most = max(most, link.slices_outstanding)
        return poll(link, turn_ends_s)

    monkeypatch.setattr(MooncakeLink, "_poll", watched_poll)

    async def scenario() -> None:
        async with writing("mooncake") as mesh:
            pages = KV_BYTES // 4096
            runs = [Run("kv", page * 4096, "kv", page * 4096, 4096) for page in range(pages - 1, -1, -1)]
            await asyncio.gather(*(mesh.link.write(runs) for _ in range(3)))
            assert mesh.peer.digest() == hashlib.sha256(mesh.source.memory).hexdigest()

    asyncio.run(scenario())
    assert 1 < most <= LIMITS.submit_window


def test_adjacent_runs_travel_as_one_slice_and_long_ones_are_split() -> None:
    async def scenario() -> None:
        async with writing("mooncake") as mesh:
            pages = [Run("kv", page * 4096, "kv", page * 4096, 4096) for page in range(256)]
            assert (await mesh.link.write(pages)).slices == 1
            assert (await mesh.link.write([WHOLE])).slices == KV_BYTES // LIMITS.max_slice_bytes

    asyncio.run(scenario())


def test_a_stopped_peer_stalls_the_waiter_and_then_fails_the_transfer() -> None:
    async def scenario() -> None:
        async with writing("mooncake") as mesh:
            os.kill(mesh.peer.process.pid, signal.SIGSTOP)
            transfer = mesh.link.write([WHOLE] * 8)
            with pytest.raises(TransferStalled) as stall:
                await transfer.wait(0.1)
            assert len(stall.value.suspect_runs) == 8
            assert not transfer.is_settled
            with pytest.raises(TransferFailed):
                await transfer
            assert mesh.endpoint.outstanding == 0
            os.kill(mesh.peer.process.pid, signal.SIGCONT)
            with pytest.raises(PeerUnreachable, match="dead"):
                mesh.link.write([WHOLE])

    asyncio.run(scenario())


def test_closing_while_the_peer_is_stopped_ends_and_fails_what_was_out() -> None:
    """By ``drain_timeout_s``, before Mooncake itself gives the peer up."""
    limits = msgspec.structs.replace(LIMITS, drain_timeout_s=0.5)

    async def scenario() -> None:
        with PeerProcess("mooncake", KV_BYTES) as peer:
            async with sending_endpoint("mooncake", limits=limits) as (endpoint, _):
                link = await endpoint.link(peer.info)
                os.kill(peer.process.pid, signal.SIGSTOP)
                transfer = link.write([WHOLE] * 8)
            with pytest.raises(TransferFailed):
                await transfer
            assert endpoint.outstanding == 0

    asyncio.run(scenario())


@asynccontextmanager
async def mute_peer() -> AsyncIterator[PeerInfo]:
    """A port that takes connections and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        port = listener.getsockname()[1]
        async with sending_endpoint("shared_memory") as (endpoint, _):
            info = endpoint.peer_info()
            yield msgspec.structs.replace(info, address=f"127.0.0.1:{port}", incarnation="ab" * 16)
    finally:
        listener.close()


def test_a_mute_peer_times_out_and_does_not_stall_another_link() -> None:
    async def scenario() -> None:
        async with writing("mooncake") as mesh, mute_peer() as mute:
            opening = asyncio.create_task(mesh.endpoint.link(mute))
            await asyncio.sleep(0)
            for _ in range(5):
                await mesh.link.write([Run("kv", 0, "kv", 0, 4096)])
            assert not opening.done()
            with PeerProcess("mooncake", KV_BYTES) as third:
                link = await mesh.endpoint.link(third.info)
                await link.write([WHOLE])
            with pytest.raises(PeerTimeout, match="5 s"):
                await opening
            assert mesh.link.is_alive

    asyncio.run(scenario())


class Redirect:
    """A fixed port that leads to whichever process is behind it now: a peer restarted on its old port.

    The real thing cannot be had in a test: the kernel keeps a dead peer's port for a minute.
    """

    def __init__(self) -> None:
        self.target_port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def announce(self, info: PeerInfo) -> PeerInfo:
        assert info.address is not None
        self.target_port = int(info.address.rpartition(":")[2])
        return msgspec.structs.replace(info, address=f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}")

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer_reader, peer_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, peer_writer), _copy(peer_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def test_a_peer_restarted_on_its_old_port_is_reached_anew() -> None:
    """Mooncake keeps a peer's descriptor for ever: under the old spelling every write would fail."""

    async def scenario() -> None:
        redirect = Redirect()
        await redirect.start()
        async with sending_endpoint("mooncake") as (endpoint, source):
            for _ in range(3):
                with PeerProcess("mooncake", KV_BYTES) as peer:
                    link = await endpoint.link(redirect.announce(peer.info))
                    await link.write([WHOLE])
                    assert peer.digest() == hashlib.sha256(source.memory).hexdigest()
        await redirect.close()

    asyncio.run(scenario())


def test_the_announcement_of_a_dead_peer_does_not_lead_into_its_successor() -> None:
    async def scenario() -> None:
        redirect = Redirect()
        await redirect.start()
        async with sending_endpoint("mooncake") as (endpoint, _):
            with PeerProcess("mooncake", KV_BYTES) as peer:
                old = redirect.announce(peer.info)
            with PeerProcess("mooncake", KV_BYTES) as successor:
                redirect.announce(successor.info)
                with pytest.raises((StalePeer, PeerUnreachable)):
                    await endpoint.link(old)
                assert successor.digest() == hashlib.sha256(bytes(KV_BYTES)).hexdigest()
        await redirect.close()

    asyncio.run(scenario())


def test_every_first_contact_uses_a_spelling_of_its_own() -> None:
    engine = MooncakeEngine(TransferConfig(), "127.0.0.1", 2)
    spellings = [engine.fresh_spelling("10.0.0.7:20001") for _ in range(4)]
    assert spellings[0] == "10.0.0.7:20001"
    assert len(set(spellings)) == 4
    for spelling in spellings:
        host, port = spelling.split(":")
        assert socket.getaddrinfo(host, int(port), socket.AF_INET)[0][4] == ("10.0.0.7", 20001)


def test_a_forked_child_may_not_use_the_engine() -> None:
    async def scenario() -> int:
        async with writing("mooncake") as mesh:
            child = os.fork()
            if child == 0:
                try:
                    mesh.link.write([WHOLE])
                except EngineStartError as exc:
                    os._exit(0 if "fork" in str(exc) else 2)
                os._exit(1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            await mesh.link.write([WHOLE])
            assert mesh.peer.digest() == hashlib.sha256(mesh.source.memory).hexdigest()
            return os.waitstatus_to_exitcode(status)

    assert asyncio.run(scenario()) == 0


def test_memory_the_engine_holds_already_is_an_overlap() -> None:
    async def scenario() -> None:
        async with sending_endpoint("mooncake") as (endpoint, source):
            with pytest.raises(RegionOverlap, match="kv"):
                endpoint.register("again", source)
            endpoint.register("other", SharedBuffer(4096))

    asyncio.run(scenario())
