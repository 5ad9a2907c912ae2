"""The emulated link, in virtual time over a real link."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.config import TransferConfig
from common.transfer import Run, TransferEndpoint, TransferFailed
from common.transfer.emulated import EmulatedLink
from common.transfer.transfer import Outbox
from tests.common.transfer.peer_process import PeerProcess
from tests.common.transfer.virtual_time import VirtualTime
from tests.common.transfer.writing import KV_BYTES, LIMITS, Writing, writing

BANDWIDTH_BYTES_PER_S = 1_000_000.0
LATENCY_S = 0.25


@asynccontextmanager
async def emulated() -> AsyncIterator[tuple[Writing, EmulatedLink, VirtualTime, Outbox]]:
    async with writing("shared_memory") as mesh:
        time = VirtualTime()
        outbox = Outbox(60.0, LIMITS)
        link = EmulatedLink(mesh.link, outbox, BANDWIDTH_BYTES_PER_S, LATENCY_S, time.clock, time.sleep)
        yield mesh, link, time, outbox
        await link.close()
        assert not outbox.open_transfers


def test_transfers_follow_one_another_at_the_links_bandwidth_and_arrive_a_latency_later() -> None:
    async def scenario() -> None:
        async with emulated() as (_, link, time, outbox):
            first = link.write([Run("kv", 0, "kv", 0, 500_000)])
            second = link.write([Run("kv", 500_000, "kv", 500_000, 1_000_000)])
            await time.wait_for_sleepers(2)
            time.advance(0.5)
            await asyncio.sleep(0)
            assert not first.is_settled
            time.advance(LATENCY_S)
            assert (await first).seconds == pytest.approx(0.5 + LATENCY_S)
            assert not second.is_settled
            assert len(outbox.open_transfers) == 1
            time.advance(1.0)
            assert (await second).seconds == pytest.approx(1.5 + LATENCY_S)

            # After a pause the link is free at once.
            time.advance(10.0)
            third = link.write([Run("kv", 0, "kv", 0, 1_000_000)])
            await time.wait_for_sleepers(1)
            time.advance(1.0 + LATENCY_S)
            assert (await third).seconds == pytest.approx(1.0 + LATENCY_S)

    asyncio.run(scenario())


def test_the_bytes_are_the_wrapped_links() -> None:
    async def scenario() -> None:
        async with emulated() as (mesh, link, time, _):
            transfer = link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
            await time.wait_for_sleepers(1)
            time.advance(100.0)
            assert (await transfer).nbytes == KV_BYTES
            assert mesh.peer.digest() == hashlib.sha256(mesh.source.memory).hexdigest()
            assert link.kind == "emulated shared_memory"
            assert link.peer == mesh.peer.info

    asyncio.run(scenario())


def test_a_failure_of_the_wrapped_link_comes_through() -> None:
    async def scenario() -> None:
        async with emulated() as (mesh, link, time, _):
            transfer = link.write([Run("kv", 0, "kv", 0, KV_BYTES)] * 16)
            mesh.peer.kill()
            await time.wait_for_sleepers(1)
            time.advance(1000.0)
            with pytest.raises(TransferFailed, match="exited"):
                await transfer
            assert not link.is_alive

    asyncio.run(scenario())


def test_closing_does_not_wait_for_emulated_time() -> None:
    async def scenario() -> None:
        async with emulated() as (_, link, time, _outbox):
            transfer = link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
            await time.wait_for_sleepers(1)
            await link.close()
            assert (await transfer).nbytes == KV_BYTES

    asyncio.run(scenario())


def test_an_endpoint_emulates_what_its_config_says() -> None:
    async def scenario() -> None:
        config = TransferConfig(path="shared_memory", emulated_bandwidth_bytes_per_s=1e12)
        endpoint = TransferEndpoint(config, LIMITS)
        await endpoint.start()
        with PeerProcess("shared_memory", KV_BYTES) as peer:
            link = await endpoint.link(peer.info)
            assert link.kind == "emulated shared_memory"
            await endpoint.close()
            assert endpoint.outstanding == 0

    asyncio.run(scenario())
