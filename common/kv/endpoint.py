"""One instance's KV as others reach it: registered memory, and the sending of blocks out of it.

The memory is the instance's own pool, or the pools of the attention workers that hold its KV head by head.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.kv.layout import KVLayout, KVSpan
from common.messages import KVDestination, PullKV
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import Run, decode_peer_info, encode_peer_info
from common.transfer.transfer import Transfer

KV_REGION = "kv"
"""The name under which every pool is registered."""


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """``layout`` and ``total_blocks`` are the instance's own pool's. ``remote``: by number, where its pools
    are instead; the table is whoever's who binds attention workers."""

    transfer: TransferEndpoint
    layout: KVLayout
    total_blocks: int
    remote: Mapping[int, tuple[KVDestination, ...]] | None = None

    def destinations(self, pool: int) -> tuple[KVDestination, ...]:
        """Where KV for that pool is to be written: nowhere any more, once the pool is lost."""
        if self.remote is not None:
            return self.remote.get(pool, ())
        endpoint = encode_peer_info(self.transfer.peer_info())
        return (KVDestination(endpoint, 0, self.layout.kv_heads, self.total_blocks),)

    async def send(self, pull: PullKV, source_blocks: tuple[int, ...], spans: Sequence[KVSpan]) -> int:
        """Writes those parts of the sequence's KV, of each its heads, to every destination; the bytes sent.

        Returns, or raises, when no byte is in the air. Raises TransferError where a peer cannot be reached
        or a transfer failed, ValueError for blocks that do not fit.
        """
        links = [await self.transfer.link(decode_peer_info(each.endpoint)) for each in pull.destinations]
        planned = [self._runs(pull, each, source_blocks, spans) for each in pull.destinations]
        transfers: list[Transfer] = []
        try:
            for link, runs in zip(links, planned, strict=True):
                transfers.append(link.write(runs))
        finally:
            await asyncio.gather(*(transfer.wait_settled() for transfer in transfers))
        return sum([(await transfer).nbytes for transfer in transfers])

    def _runs(
        self,
        pull: PullKV,
        destination: KVDestination,
        source_blocks: tuple[int, ...],
        spans: Sequence[KVSpan],
    ) -> list[Run]:
        heads = range(destination.first_head, destination.first_head + destination.kv_heads)
        return [
            Run(KV_REGION, source, KV_REGION, target, nbytes)
            for span in spans
            for source, target, nbytes in self.layout.paired_runs(
                source_blocks,
                pull.blocks[: len(source_blocks)],
                span.positions,
                self.total_blocks,
                destination.total_blocks,
                span.layers,
                heads,
            )
        ]
