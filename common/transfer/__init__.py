"""The one way bytes move between processes outside the bus: registered memory, links, transfers.

The receiver allocates and announces (PeerInfo, over the control plane), the sender writes (Link.write),
completion is told by a message of ours after the transfer has settled (DistServe 4.3's pull: the receiver
says when and where to, the sender moves the bytes). Two paths serve the same interface: Mooncake between
hosts, a memory copy on one host; a third link slows either down for experiments.

    endpoint = TransferEndpoint(config.transfer)
    await endpoint.start()
    endpoint.register("kv", SharedBuffer(nbytes))
    ...                                               # endpoint.peer_info() travels to the writer
    link = await endpoint.link(peer_info_of_the_receiver)
    statistics = await link.write([Run("kv", 0, "kv", 4096, 1024)])

Reading order: interface, transfer, regions, buffers, endpoint; then mooncake_link over mooncake, and
shared_memory over memory_copy.
"""

from common.transfer.buffers import ForeignMemory, SharedBuffer
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import (
    SOCKET_GRACE_S,
    EngineStartError,
    Link,
    LinkBusy,
    PeerInfo,
    PeerTimeout,
    PeerUnreachable,
    RegionError,
    RegionInfo,
    RegionOverlap,
    Run,
    StalePeer,
    TransferFailed,
    TransferLimits,
    TransferStalled,
    TransferStatistics,
    decode_peer_info,
    encode_peer_info,
)
from common.transfer.transfer import Transfer

__all__ = [
    "SOCKET_GRACE_S",
    "EngineStartError",
    "ForeignMemory",
    "Link",
    "LinkBusy",
    "PeerInfo",
    "PeerTimeout",
    "PeerUnreachable",
    "RegionError",
    "RegionInfo",
    "RegionOverlap",
    "Run",
    "SharedBuffer",
    "StalePeer",
    "Transfer",
    "TransferEndpoint",
    "TransferFailed",
    "TransferLimits",
    "TransferStalled",
    "TransferStatistics",
    "decode_peer_info",
    "encode_peer_info",
]
