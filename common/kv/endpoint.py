"""One instance's KV pool as others reach it: registered memory, and the sending of blocks out of it."""

from dataclasses import dataclass

from common.kv.layout import KVLayout
from common.messages import PullKV
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import Run, decode_peer_info, encode_peer_info
from common.transfer.transfer import Transfer

KV_REGION = "kv"
"""The name under which every instance registers its pool."""


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """``encoded`` is what travels in PullKV.endpoint."""

    transfer: TransferEndpoint
    layout: KVLayout
    total_blocks: int

    def encoded(self) -> bytes:
        return encode_peer_info(self.transfer.peer_info())

    async def send(self, pull: PullKV, source_blocks: tuple[int, ...], kv_tokens: int) -> Transfer:
        """Starts writing the first ``kv_tokens`` positions into the puller's blocks.

        The Transfer resolves when no byte of it is in the air. Raises TransferError where the peer cannot
        be reached; then nothing was sent.
        """
        peer = decode_peer_info(pull.endpoint)
        link = await self.transfer.link(peer)
        pairs = self.layout.paired_runs(
            source_blocks,
            pull.blocks[: len(source_blocks)],
            kv_tokens,
            self.total_blocks,
            pull.total_blocks,
            range(self.layout.layers),
        )
        return link.write(
            [Run(KV_REGION, source, KV_REGION, destination, nbytes) for source, destination, nbytes in pairs]
        )
