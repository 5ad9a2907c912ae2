"""The sending side of the tests: an endpoint in this process, a peer in another, and a link between them."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.config import TransferConfig, TransferPath
from common.transfer import Link, SharedBuffer, TransferEndpoint, TransferLimits
from tests.common.transfer.peer_process import PeerProcess

KV_BYTES = 8 << 20
LIMITS = TransferLimits(open_timeout_s=5.0, progress_timeout_s=2, drain_timeout_s=5.0)
"""Mooncake reads the progress timeout once per process, so all tests of this process use the same."""


@dataclass(frozen=True, slots=True)
class Writing:
    """``source`` is this process's region ``kv``, filled with bytes that differ everywhere."""

    endpoint: TransferEndpoint
    source: SharedBuffer
    peer: PeerProcess
    link: Link


@asynccontextmanager
async def sending_endpoint(
    path: TransferPath, kv_bytes: int = KV_BYTES, limits: TransferLimits = LIMITS
) -> AsyncIterator[tuple[TransferEndpoint, SharedBuffer]]:
    """An endpoint with a region ``kv``; checks at the end that nothing is left in flight."""
    endpoint = TransferEndpoint(TransferConfig(path=path), limits)
    await endpoint.start()
    try:
        source = SharedBuffer(kv_bytes)
        source.memory[:] = random.Random(kv_bytes).randbytes(kv_bytes)
        endpoint.register("kv", source)
        yield endpoint, source
    finally:
        await endpoint.close()
    assert endpoint.outstanding == 0


@asynccontextmanager
async def writing(
    path: TransferPath, kv_bytes: int = KV_BYTES, limits: TransferLimits = LIMITS
) -> AsyncIterator[Writing]:
    """A sender, a receiver and an open link."""
    with PeerProcess(path, kv_bytes) as peer:
        async with sending_endpoint(path, kv_bytes, limits) as (endpoint, source):
            link = await endpoint.link(peer.info)
            yield Writing(endpoint, source, peer, link)
