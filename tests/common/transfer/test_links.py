"""What both paths promise, between two real processes."""

import asyncio
import hashlib
import itertools
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import TransferPath
from common.transfer import (
    Link,
    LinkBusy,
    PeerUnreachable,
    RegionError,
    Run,
    StalePeer,
    TransferFailed,
)
from tests.common.transfer.peer_process import PeerProcess
from tests.common.transfer.writing import KV_BYTES, LIMITS, Writing, sending_endpoint, writing

PATHS = [path for path in get_args(TransferPath) if path != "auto"]
both_paths = pytest.mark.parametrize("path", PATHS)

SMALL_KV_BYTES = 64 << 10
OVER_AND_OVER = 16


@st.composite
def scattered_runs(draw: st.DrawFn) -> list[Run]:
    """Runs in any order whose destinations do not overlap: Mooncake keeps no order between slices."""
    edges = draw(st.lists(st.integers(0, SMALL_KV_BYTES), min_size=2, max_size=40, unique=True))
    edges.sort()
    spans = draw(st.permutations(list(itertools.pairwise(edges))))
    runs = []
    for start, end in spans[: draw(st.integers(1, len(spans)))]:
        nbytes = end - start
        source = draw(st.one_of(st.just(start), st.integers(0, SMALL_KV_BYTES - nbytes)))
        runs.append(Run("kv", source, "kv", start, nbytes))
    return runs


@both_paths
def test_bytes_arrive_exactly_where_the_runs_say_and_nowhere_else(path: TransferPath) -> None:
    async def check(peer: PeerProcess, link: Link, source: bytes, mirror: bytearray, runs: list[Run]) -> None:
        statistics = await link.write(runs)
        for run in runs:
            mirror[run.remote_offset : run.remote_offset + run.nbytes] = source[
                run.local_offset : run.local_offset + run.nbytes
            ]
        assert statistics.nbytes == sum(run.nbytes for run in runs)
        assert statistics.slices <= len(runs)
        assert peer.digest() == hashlib.sha256(mirror).hexdigest()

    with asyncio.Runner() as runner:
        context = writing(path, SMALL_KV_BYTES)
        mesh: Writing = runner.run(context.__aenter__())
        mirror = bytearray(SMALL_KV_BYTES)
        source = bytes(mesh.source.memory)

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(scattered_runs())
        def holds(runs: list[Run]) -> None:
            runner.run(check(mesh.peer, mesh.link, source, mirror, runs))

        holds()
        runner.run(context.__aexit__(None, None, None))


@both_paths
def test_twenty_thousand_small_runs_arrive(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            # Every second page, in an order that leaves nothing to join.
            pages = KV_BYTES // 256
            order = [(page * 7919) % pages for page in range(20_000)]
            runs = [Run("kv", page * 256, "kv", page * 256, 256) for page in order]
            mirror = bytearray(KV_BYTES)
            for page in order:
                mirror[page * 256 : page * 256 + 256] = mesh.source.memory[page * 256 : page * 256 + 256]
            statistics = await mesh.link.write(runs)
            assert statistics.slices == 20_000
            assert mesh.peer.digest() == hashlib.sha256(mirror).hexdigest()

    asyncio.run(scenario())


@both_paths
def test_transfers_at_the_same_time_all_arrive(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            part = KV_BYTES // 32
            transfers = [
                mesh.link.write([Run("kv", index * part, "kv", index * part, part)]) for index in range(32)
            ]
            await asyncio.gather(*transfers)
            assert mesh.peer.digest() == hashlib.sha256(mesh.source.memory).hexdigest()

    asyncio.run(scenario())


@both_paths
def test_a_write_of_nothing_has_arrived(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            statistics = await mesh.link.write([])
            assert (statistics.nbytes, statistics.slices) == (0, 0)

    asyncio.run(scenario())


@both_paths
def test_a_run_out_of_range_is_refused_before_anything_is_sent(path: TransferPath) -> None:
    good = Run("kv", 0, "kv", 0, 16)
    bad = [
        Run("kv", KV_BYTES - 1, "kv", 0, 2),
        Run("kv", 0, "kv", KV_BYTES - 1, 2),
        Run("kv", -1, "kv", 0, 2),
        Run("kv", 0, "kv", -1, 2),
        Run("kv", 0, "kv", 0, 0),
        Run("weights", 0, "kv", 0, 1),
        Run("kv", 0, "weights", 0, 1),
    ]

    async def scenario() -> None:
        async with writing(path) as mesh:
            for run in bad:
                with pytest.raises(RegionError, match=r"kv|weights"):
                    mesh.link.write([good, run])
            assert mesh.link.is_alive
            assert mesh.peer.digest() == hashlib.sha256(bytes(KV_BYTES)).hexdigest()

    asyncio.run(scenario())


@both_paths
def test_a_cancelled_waiter_only_detaches(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            # Of many pieces, which are copied in turn: however busy the machine, it is on its way.
            transfer = mesh.link.write([Run("kv", 0, "kv", 0, KV_BYTES)] * OVER_AND_OVER)
            waiter = asyncio.ensure_future(transfer)
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert mesh.endpoint.outstanding == 1
            assert mesh.endpoint.is_read("kv")
            await transfer.wait_settled()
            assert not mesh.endpoint.is_read("kv")
            assert mesh.peer.digest() == hashlib.sha256(mesh.source.memory).hexdigest()

    asyncio.run(scenario())


@both_paths
def test_a_peer_killed_in_mid_transfer_fails_it_and_a_restarted_peer_gets_a_link_of_its_own(
    path: TransferPath,
) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            runs = [Run("kv", 0, "kv", 0, KV_BYTES)] * 64
            transfers = [mesh.link.write(runs) for _ in range(4)]
            mesh.peer.kill()
            for transfer in transfers:
                with pytest.raises(TransferFailed):
                    await transfer
            assert not mesh.link.is_alive
            with pytest.raises(PeerUnreachable, match="dead"):
                mesh.link.write(runs)
            with pytest.raises(PeerUnreachable):
                await mesh.endpoint.link(mesh.peer.info)
            assert mesh.endpoint.outstanding == 0

            with PeerProcess(path, KV_BYTES) as restarted:
                link = await mesh.endpoint.link(restarted.info)
                await link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
                assert restarted.digest() == hashlib.sha256(mesh.source.memory).hexdigest()
            assert not mesh.link.is_alive

    asyncio.run(scenario())


@both_paths
def test_a_failed_transfer_names_the_runs_whose_destination_is_suspect(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            runs = [Run("kv", 0, "kv", 0, KV_BYTES)] * 32
            first = mesh.link.write(runs[:1])
            transfer = mesh.link.write(runs)
            await first
            mesh.peer.kill()
            with pytest.raises(TransferFailed) as failure:
                await transfer
            assert failure.value.suspect_runs == tuple(runs)

    asyncio.run(scenario())


@both_paths
def test_another_process_than_the_announced_one_is_stale(path: TransferPath) -> None:
    async def scenario() -> None:
        with PeerProcess(path, KV_BYTES) as peer:
            async with sending_endpoint(path) as (endpoint, _):
                announced = msgspec.structs.replace(peer.info, incarnation="00" * 16)
                with pytest.raises(StalePeer):
                    await endpoint.link(announced)
                assert (await endpoint.link(peer.info)).is_alive

    asyncio.run(scenario())


@both_paths
def test_a_peer_that_is_gone_is_unreachable(path: TransferPath) -> None:
    async def scenario() -> None:
        with PeerProcess(path, KV_BYTES) as peer:
            peer.kill()
            async with sending_endpoint(path) as (endpoint, _):
                with pytest.raises(PeerUnreachable):
                    await endpoint.link(peer.info)

    asyncio.run(scenario())


@both_paths
def test_all_who_ask_for_a_peer_share_one_link(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            links = await asyncio.gather(*(mesh.endpoint.link(mesh.peer.info) for _ in range(8)))
            assert all(link is mesh.link for link in links)

    asyncio.run(scenario())


@both_paths
def test_a_peer_that_lives_gets_a_new_link_after_one_died(path: TransferPath) -> None:
    async def scenario() -> None:
        async with writing(path) as mesh:
            mesh.link.die("a slice failed")
            with pytest.raises(PeerUnreachable, match="a slice failed"):
                mesh.link.write([Run("kv", 0, "kv", 0, 1)])
            link = await mesh.endpoint.link(mesh.peer.info)
            assert link is not mesh.link
            await link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
            assert mesh.peer.digest() == hashlib.sha256(mesh.source.memory).hexdigest()
            assert await mesh.endpoint.link(mesh.peer.info) is link

    asyncio.run(scenario())


@both_paths
def test_the_queue_of_a_link_is_bounded(path: TransferPath) -> None:
    async def scenario() -> None:
        limits = msgspec.structs.replace(LIMITS, max_queued_transfers=2)
        async with writing(path, limits=limits) as mesh:
            runs = [Run("kv", 0, "kv", 0, KV_BYTES)]
            transfers = [mesh.link.write(runs), mesh.link.write(runs)]
            with pytest.raises(LinkBusy):
                mesh.link.write(runs)
            await asyncio.gather(*transfers)
            await mesh.link.write(runs)

    asyncio.run(scenario())


@both_paths
def test_closing_sends_what_is_queued_and_takes_no_more(path: TransferPath) -> None:
    async def scenario() -> None:
        with PeerProcess(path, KV_BYTES) as peer:
            async with sending_endpoint(path) as (endpoint, source):
                link = await endpoint.link(peer.info)
                transfer = link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
                await link.close()
                assert (await transfer).nbytes == KV_BYTES
                with pytest.raises(PeerUnreachable):
                    link.write([Run("kv", 0, "kv", 0, 1)])
                assert peer.digest() == hashlib.sha256(source.memory).hexdigest()

    asyncio.run(scenario())


@both_paths
def test_a_process_can_write_to_itself(path: TransferPath) -> None:
    async def scenario() -> None:
        async with sending_endpoint(path) as (endpoint, source):
            link = await endpoint.link(endpoint.peer_info())
            await link.write([Run("kv", 0, "kv", KV_BYTES // 2, KV_BYTES // 2)])
            half = KV_BYTES // 2
            assert source.memory[:half] == source.memory[half:]

    asyncio.run(scenario())
