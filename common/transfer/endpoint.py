"""A process's end of every transfer: its registered memory, its address, and its links.

Lifetime: ``start``, ``register`` everything, then ``peer_info`` (which seals the set: peers are told once,
and RDMA descriptors are read at first contact), then ``link`` as often as wanted, then ``close``.

Per incarnation of a peer there is one link, opened once, however many ask for it. The path is chosen per
link: ``auto`` copies through shared memory where the peer lives on this host and all its memory can be
mapped, and uses Mooncake everywhere else.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common.config import TransferConfig
from common.errors import ConfigError
from common.transfer.buffers import ForeignMemory, SharedBuffer, host_identity, map_region
from common.transfer.emulated import EmulatedLink
from common.transfer.interface import (
    EngineStartError,
    Link,
    PeerInfo,
    PeerUnreachable,
    RegionError,
    RegionInfo,
    StalePeer,
    TransferLimits,
)
from common.transfer.mailbox import MAILBOX, Mailbox
from common.transfer.mirror import MappedMirror, MooncakeMirror
from common.transfer.mooncake import MooncakeEngine, run_in_thread
from common.transfer.mooncake_link import open_mooncake_link
from common.transfer.regions import Region, check_new_region
from common.transfer.shared_memory import open_shared_memory_link
from common.transfer.transfer import Outbox

DEFAULT_LIMITS = TransferLimits()
MIRROR_SETTLES_S = 60.0
"""Mooncake gives every write up within 48 s."""


class TransferEndpoint:
    """One per process. ``engine_error`` says why Mooncake is not there when ``auto`` went on without it."""

    def __init__(self, config: TransferConfig, limits: TransferLimits = DEFAULT_LIMITS) -> None:
        self.engine_error: EngineStartError | None = None
        self._config = config
        self._limits = limits
        self._outbox = Outbox(config.deadline_s, limits)
        self._mailbox = Mailbox()
        self._shared: dict[str, SharedBuffer] = {}
        self._engine: MooncakeEngine | None = None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._peer_info: PeerInfo | None = None
        self._links: dict[str, asyncio.Task[Link]] = {}
        self._retired: list[Link] = []

    async def start(self) -> None:
        """Starts Mooncake unless the path excludes it. Raises EngineStartError or ConfigError (the host)."""
        if self._config.path != "shared_memory":
            await self._start_engine()
        self.register(MAILBOX, self._mailbox.buffer)

    async def _start_engine(self) -> None:
        host = await _resolve_ipv4(self._config.host)
        engine = MooncakeEngine(self._config, host, self._limits.progress_timeout_s)
        try:
            await run_in_thread(engine.start, "mooncake-start")
        except EngineStartError as exc:
            if self._config.path == "mooncake" or self._config.protocol != "tcp":
                raise
            self.engine_error = exc
        else:
            self._engine = engine

    # -- memory ---------------------------------------------------------------------------------------------

    def register(self, name: str, memory: SharedBuffer | ForeignMemory) -> None:
        """Makes memory a source and a destination of transfers: few and large. Raises RegionError."""
        if self._peer_info is not None:
            raise RegionError(f"region {name!r}: peers have been told of this process's memory already")
        self._register(name, memory)

    def _register(self, name: str, memory: SharedBuffer | ForeignMemory) -> None:
        is_host = isinstance(memory, SharedBuffer) or memory.is_host
        region = Region(name, memory.address, memory.nbytes, memory, is_host)
        check_new_region(region, self._outbox.regions)
        # Mooncake's nvlink transport refuses host memory; identity is then proved by mapping the mailbox.
        if self._engine is not None and not (is_host and self._config.protocol == "nvlink"):
            self._engine.register(region)
        self._outbox.regions[name] = region
        if isinstance(memory, SharedBuffer):
            self._shared[name] = memory

    def peer_info(self) -> PeerInfo:
        """What a peer needs to write into this process. No more memory can be registered afterwards."""
        if self._peer_info is None:
            self._peer_info = PeerInfo(
                address=None if self._engine is None else self._engine.address,
                incarnation=self._mailbox.incarnation,
                host=host_identity(),
                pid=os.getpid(),
                regions=tuple(self._announce(region) for region in self._outbox.regions.values()),
            )
        return self._peer_info

    def _announce(self, region: Region) -> RegionInfo:
        shared = self._shared.get(region.name)
        return RegionInfo(region.name, region.base, region.nbytes, shared.handle if shared else None)

    def offer(self, memory: Mapping[str, SharedBuffer | ForeignMemory]) -> PeerInfo:
        """Memory with an identity of its own: to peers another process, with links of their own.

        What is still written under an identity that was withdrawn can reach no memory that is offered later.
        """
        mailbox = Mailbox()
        regions = []
        for name, buffer in {MAILBOX: mailbox.buffer, **memory}.items():
            self._register(f"{mailbox.incarnation}/{name}", buffer)
            handle = buffer.handle if isinstance(buffer, SharedBuffer) else None
            regions.append(RegionInfo(name, buffer.address, buffer.nbytes, handle))
        return PeerInfo(
            address=None if self._engine is None else self._engine.address,
            incarnation=mailbox.incarnation,
            host=host_identity(),
            pid=os.getpid(),
            regions=tuple(regions),
        )

    def withdraw(self, offered: PeerInfo) -> None:
        """Nobody can write there any more, except who has mapped it: into memory that nobody reads."""
        for region in offered.regions:
            name = f"{offered.incarnation}/{region.name}"
            self._unregister(name)
            if region.shared is not None:
                self._shared.pop(name).close()

    def _unregister(self, name: str) -> None:
        region = self._outbox.regions.pop(name)
        if self._engine is not None:
            self._engine.unregister(region)

    @property
    def outstanding(self) -> int:
        """Transfers that have not settled."""
        return len(self._outbox.open_transfers)

    def is_read(self, region: str) -> bool:
        """Whether a transfer under way reads the region."""
        return any(transfer.reads(region) for transfer in self._outbox.open_transfers)

    # -- links ----------------------------------------------------------------------------------------------

    async def link(self, peer: PeerInfo) -> Link:
        """The link to this incarnation, opened if need be: anew where the last one died, as a peer that was
        only slow proves by first contact that it is still the one that was announced.

        Raises PeerUnreachable, PeerTimeout or StalePeer. A failed opening is forgotten, may be tried again.
        """
        self._retire_dead()
        opening = self._links.get(peer.incarnation)
        if opening is None:
            opening = asyncio.create_task(self._open(peer), name=f"open link {peer.incarnation[:8]}")
            self._links[peer.incarnation] = opening
            opening.add_done_callback(lambda task: self._forget_if_failed(peer.incarnation, task))
        await asyncio.wait([opening])
        if opening.cancelled():
            raise PeerUnreachable(f"the link to peer {peer.incarnation[:8]} was closed while it was opened")
        link = opening.result()
        if link.peer != peer:
            raise StalePeer(f"peer {peer.incarnation[:8]} was announced before with another address")
        return link

    async def mirror(self, peer: PeerInfo, region: str) -> MappedMirror | MooncakeMirror:
        """The peer's region, to be written by one thread. Raises as ``link``, or RegionError."""
        info = peer.region(region)
        # Whatever the peer's other regions are: only this one is written to, from the host's memory.
        is_near = peer.host == host_identity() and info.shared is not None
        if self._config.path == "shared_memory" or (self._config.path == "auto" and is_near):
            return MappedMirror(map_region(peer.pid, info))
        if self._engine is None:
            raise PeerUnreachable(f"no path to peer {peer.incarnation[:8]}: {self.engine_error}")
        # A link of its own: its first contact proves who answers, its writes stay off the pump of others'.
        link = await open_mooncake_link(self._engine, peer, self._mailbox, self._outbox)
        buffer = SharedBuffer(info.nbytes, "lamella-mirror")
        self._register(f"{peer.incarnation}/{region}", buffer)
        return MooncakeMirror(self._engine, link.spelling, info.base, buffer, peer.incarnation[:8])

    async def close_mirror(self, peer: PeerInfo, region: str, mirror: MappedMirror | MooncakeMirror) -> None:
        """Waits until none of its writes is in the air."""
        if isinstance(mirror, MooncakeMirror):
            await run_in_thread(partial(mirror.wait_settled, MIRROR_SETTLES_S), "mirror-close")
            name = f"{peer.incarnation}/{region}"
            self._unregister(name)
            self._shared.pop(name).close()

    def _retire_dead(self) -> None:
        """Dead links leave the table; those with bytes in the air are kept until these have settled."""
        for incarnation, opening in list(self._links.items()):
            if opening.done() and not opening.result().is_alive:
                self._retired.append(opening.result())
                del self._links[incarnation]
        self._retired = [link for link in self._retired if not link.is_idle]

    def _forget_if_failed(self, incarnation: str, opening: "asyncio.Task[Link]") -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._links.pop(incarnation, None)

    async def _open(self, peer: PeerInfo) -> Link:
        link = await self._open_path(peer)
        config = self._config
        if config.emulated_bandwidth_bytes_per_s is None and config.emulated_latency_s == 0:
            return link
        return EmulatedLink(
            link, self._outbox, config.emulated_bandwidth_bytes_per_s, config.emulated_latency_s
        )

    async def _open_path(self, peer: PeerInfo) -> Link:
        if self._config.path == "shared_memory":
            if peer.host != host_identity():
                raise PeerUnreachable(f"peer {peer.incarnation[:8]} shares no memory: it is on another host")
            return open_shared_memory_link(peer, self._copier, self._outbox)
        if self._may_share_memory(peer):
            try:
                return open_shared_memory_link(peer, self._copier, self._outbox)
            except PeerUnreachable:
                # Another user's process, say. Without an engine that is the answer.
                if self._engine is None or peer.address is None:
                    raise
        if self._engine is None:
            raise PeerUnreachable(f"no path to peer {peer.incarnation[:8]}: {self.engine_error}")
        return await open_mooncake_link(self._engine, peer, self._mailbox, self._outbox)

    def _may_share_memory(self, peer: PeerInfo) -> bool:
        return (
            self._config.path == "auto"
            and self._config.protocol == "tcp"
            and peer.host == host_identity()
            and all(region.shared is not None for region in peer.regions)
            and all(region.is_host for region in self._outbox.regions.values())
        )

    async def close(self) -> None:
        """Drains all links for a bounded time, then ends the engine: that halts the process for up to 1 s."""
        openings = list(self._links.values())
        for opening in openings:
            opening.cancel()
        results = await asyncio.gather(*openings, return_exceptions=True)
        opened = [result for result in results if not isinstance(result, BaseException)]
        links = [*opened, *self._retired]
        self._links.clear()
        self._retired.clear()
        await asyncio.gather(*(link.close() for link in links))
        self._copier.shutdown()
        if self._engine is not None:
            await run_in_thread(self._engine.close, "mooncake-close")
            self._engine = None
        for link in links:
            link.forfeit()
        self._outbox.regions.clear()
        self._mailbox.buffer.close()


async def _resolve_ipv4(host: str) -> str:
    """Mooncake's peers are told apart by address and port, so the address is a number from here on."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(
            "transfer.host", host, f"must be an address or name of this machine: {exc}"
        ) from exc
    address = str(found[0][4][0])
    if address == "0.0.0.0":
        raise ConfigError("transfer.host", host, "must be an address that peers can reach")
    return address
