"""Which path a link takes, what may be registered, and what an announcement may say."""

import asyncio
import ctypes
import hashlib
import sys

import msgspec
import pytest

from common.config import TransferConfig
from common.errors import ConfigError
from common.transfer import (
    ForeignMemory,
    PeerUnreachable,
    RegionError,
    Run,
    SharedBuffer,
    StalePeer,
    TransferEndpoint,
    TransferLimits,
    decode_peer_info,
    encode_peer_info,
)
from tests.common.transfer.peer_process import PeerProcess
from tests.common.transfer.writing import KV_BYTES, LIMITS, sending_endpoint


def test_auto_copies_on_this_host_and_uses_mooncake_for_another() -> None:
    async def scenario() -> None:
        with PeerProcess("auto", KV_BYTES) as near, PeerProcess("auto", KV_BYTES) as far:
            async with sending_endpoint("auto") as (endpoint, source):
                elsewhere = msgspec.structs.replace(far.info, host="another boot/another namespace")
                for peer, info, kind in (
                    (near, near.info, "shared_memory"),
                    (far, elsewhere, "mooncake"),
                ):
                    link = await endpoint.link(info)
                    assert link.kind == kind
                    await link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
                    assert peer.digest() == hashlib.sha256(source.memory).hexdigest()

    asyncio.run(scenario())


def test_auto_uses_mooncake_where_the_peers_memory_is_not_shared() -> None:
    async def scenario() -> None:
        with PeerProcess("auto", KV_BYTES) as peer:
            async with sending_endpoint("auto") as (endpoint, _):
                regions = tuple(msgspec.structs.replace(region, shared=None) for region in peer.info.regions)
                link = await endpoint.link(msgspec.structs.replace(peer.info, regions=regions))
                assert link.kind == "mooncake"

    asyncio.run(scenario())


def test_auto_goes_on_without_mooncake_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)

    async def scenario() -> None:
        with PeerProcess("shared_memory", KV_BYTES) as peer:
            async with sending_endpoint("auto") as (endpoint, _):
                assert endpoint.engine_error is not None
                assert endpoint.peer_info().address is None
                link = await endpoint.link(peer.info)
                await link.write([Run("kv", 0, "kv", 0, KV_BYTES)])
                elsewhere = msgspec.structs.replace(peer.info, host="elsewhere", incarnation="cd" * 16)
                with pytest.raises(PeerUnreachable, match="Mooncake"):
                    await endpoint.link(elsewhere)

    asyncio.run(scenario())


def test_shared_memory_refuses_another_host() -> None:
    async def scenario() -> None:
        with PeerProcess("shared_memory", KV_BYTES) as peer:
            async with sending_endpoint("shared_memory") as (endpoint, _):
                with pytest.raises(PeerUnreachable, match="another host"):
                    await endpoint.link(msgspec.structs.replace(peer.info, host="elsewhere"))

    asyncio.run(scenario())


def test_an_incarnation_has_one_announcement() -> None:
    async def scenario() -> None:
        with PeerProcess("shared_memory", KV_BYTES) as peer:
            async with sending_endpoint("shared_memory") as (endpoint, _):
                await endpoint.link(peer.info)
                with pytest.raises(StalePeer, match="announced before"):
                    await endpoint.link(msgspec.structs.replace(peer.info, regions=peer.info.regions[:1]))

    asyncio.run(scenario())


def test_memory_cannot_be_registered_once_peers_were_told() -> None:
    async def scenario() -> None:
        async with sending_endpoint("shared_memory") as (endpoint, _):
            endpoint.peer_info()
            with pytest.raises(RegionError, match="told"):
                endpoint.register("more", SharedBuffer(4096))

    asyncio.run(scenario())


def test_foreign_memory_is_a_source_and_is_kept_while_registered() -> None:
    async def scenario() -> None:
        array = (ctypes.c_char * 4096)()
        ctypes.memset(array, 7, 4096)
        with PeerProcess("shared_memory", 4096) as peer:
            async with sending_endpoint("shared_memory") as (endpoint, _):
                endpoint.register("weights", ForeignMemory(ctypes.addressof(array), 4096, array))
                del array
                link = await endpoint.link(peer.info)
                await link.write([Run("weights", 0, "kv", 0, 4096)])
                assert peer.digest() == hashlib.sha256(b"\7" * 4096).hexdigest()

    asyncio.run(scenario())


def test_no_memory_copy_touches_device_memory() -> None:
    async def scenario() -> None:
        with PeerProcess("shared_memory", 4096) as peer:
            async with sending_endpoint("shared_memory") as (endpoint, _):
                endpoint.register("gpu", ForeignMemory(1 << 40, 4096, None, is_host=False))
                link = await endpoint.link(peer.info)
                with pytest.raises(RegionError, match="device memory"):
                    link.write([Run("gpu", 0, "kv", 0, 16)])

    asyncio.run(scenario())


def test_memory_beside_what_cannot_be_mapped_is_still_mapped_itself() -> None:
    """As an attention worker on a device offers it: KV in the device's memory, exchange in the host's."""

    async def scenario() -> None:
        array = (ctypes.c_char * 4096)()
        exchange = SharedBuffer(64)
        async with sending_endpoint("auto", 4096) as (endpoint, source):
            offered = endpoint.offer(
                {"pool": ForeignMemory(ctypes.addressof(array), 4096, array), "q": exchange}
            )
            link = await endpoint.link(offered)
            assert link.kind == "mooncake"
            await link.write([Run("kv", 0, "pool", 0, 4096)])
            assert bytes(array) == bytes(source.memory)
            mirror = await endpoint.mirror(offered, "q")
            assert mirror.kind == "shared_memory"
            mirror.memory[:5] = b"hello"
            assert bytes(exchange.memory[:5]) == b"hello"
            endpoint.withdraw(offered)

    asyncio.run(scenario())


def test_an_announcement_survives_the_wire_and_garbage_does_not() -> None:
    async def scenario() -> None:
        async with sending_endpoint("shared_memory") as (endpoint, _):
            info = endpoint.peer_info()
            assert decode_peer_info(encode_peer_info(info)) == info
            for garbage in (b"", b"\x00", encode_peer_info(info)[:-3]):
                with pytest.raises(StalePeer, match="not a transfer address"):
                    decode_peer_info(garbage)

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["0.0.0.0", "no-such-host.invalid"])
def test_a_host_that_no_peer_can_reach_is_a_config_error(host: str) -> None:
    async def scenario() -> None:
        endpoint = TransferEndpoint(TransferConfig(path="mooncake", host=host), LIMITS)
        with pytest.raises(ConfigError, match=r"transfer\.host"):
            await endpoint.start()
        await endpoint.close()

    asyncio.run(scenario())


def test_limits_that_would_wedge_a_peer_are_refused() -> None:
    with pytest.raises(ConfigError, match="submit_window"):
        TransferLimits(submit_window=2000)
    with pytest.raises(ConfigError, match="open_timeout_s"):
        TransferLimits(open_timeout_s=0)
