"""An attention worker: a process without weights that holds KV and computes attention over it.

It allocates and registers its memory, then waits to be bound by a decode instance. From then on the engine's
thread answers that instance through shared memory, and this loop only watches.
"""

import asyncio
import logging
import os
import select
import threading
from dataclasses import dataclass, field

import torch

from attention import state as decisions
from attention.engine import AttentionLoop
from attention.state import AttentionState
from common.config import Config
from common.errors import InvalidRequest, ServiceError
from common.host_cores import open_host_cores
from common.kv.endpoint import KV_REGION
from common.kv.pool import KVPool
from common.messages import AttentionBound, BindAttention, ServiceRecord
from common.model.exchange import PeerSilent, request_region, response_region
from common.service import Running, ServiceProcess, run_service
from common.transfer.buffers import MappedRegion, SharedBuffer, host_identity, map_region
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import PeerInfo, decode_peer_info, encode_peer_info
from common.transfer.shared_memory import open_pidfd

log = logging.getLogger("lamella.attention")

REQUEST_REGION = "attention-request"
"""The name under which every worker registers the memory it is asked through."""


class ModelWorkerLost(ServiceError):
    """The decode instance that this worker served is gone, and this life with it."""


@dataclass(slots=True)
class AttentionService:
    """``ended`` is set when the served instance is gone."""

    state: AttentionState
    transfer: TransferEndpoint
    kv: SharedBuffer
    requests: SharedBuffer
    process: ServiceProcess
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    async def bind(self, message: BindAttention) -> AttentionBound:
        """Begins to serve. Raises Overloaded, InvalidRequest, TransferError."""
        peer = decode_peer_info(message.endpoint)
        if peer.host != host_identity():
            raise InvalidRequest("an attention worker and its decode instance must share a host's memory")
        mapped = map_region(peer.pid, peer.region(message.response_region))
        for command in self.state.handle(decisions.BindArrived(message)):
            assert isinstance(command, decisions.StartServing)
            self._serve(command, peer, mapped)
        log.info("attention_bound", extra={"instance": message.decode_instance})
        total_blocks = self.kv.nbytes // message.layout.block_bytes
        return AttentionBound(encode_peer_info(self.transfer.peer_info()), total_blocks)

    def _serve(self, command: decisions.StartServing, peer: PeerInfo, mapped: MappedRegion) -> None:
        bind = command.bind
        dtype: torch.dtype = getattr(torch, bind.shape.element_type)
        pool = KVPool(bind.layout, command.total_blocks, dtype, torch.device("cpu"), self.kv.memory)
        pidfd = open_pidfd(peer)
        exits = select.poll()
        exits.register(pidfd, select.POLLIN)
        loop = AttentionLoop(
            pool,
            bind.attention_specs,
            request_region(self.requests.memory, bind.shape),
            response_region(memoryview(mapped.mapping), bind.shape),
            lambda: self._stop.is_set() or bool(exits.poll(0)),
            open_host_cores(),
        )
        main = asyncio.get_running_loop()

        def run() -> None:
            try:
                loop.run()
            except PeerSilent as exc:
                log.warning("step_abandoned", extra={"error": str(exc)})
            except Exception:
                log.exception("attention_failed")
            finally:
                os.close(pidfd)
                main.call_soon_threadsafe(self.ended.set)

        self._thread = threading.Thread(target=run, name="attention", daemon=True)
        self._thread.start()
        self.process.spawn(self._watch())

    async def _watch(self) -> None:
        await self.ended.wait()
        for command in self.state.handle(decisions.ModelWorkerGone()):
            assert isinstance(command, decisions.EndProcess)
            if not self.process.is_draining:
                raise ModelWorkerLost(f"decode instance {self.state.serves} is gone")

    async def drain(self, timeout_s: float) -> None:
        """Serves on until the decode instance has ended: its sequences finish with their KV."""
        if self.state.serves is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()
        except TimeoutError:
            log.warning("drain_expired", extra={"instance": self.state.serves})

    async def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self.transfer.close()
        self.kv.close()
        self.requests.close()


async def run_attention(config: Config) -> None:
    """Runs one attention worker until it is told to stop or the instance it served is gone."""
    await run_service(config, "attention", _start)


async def _start(process: ServiceProcess) -> Running:
    config = process.config
    kv = SharedBuffer(config.attention.kv_bytes, "lamella-kv")
    requests = SharedBuffer(config.attention.exchange_bytes, "lamella-attention")
    transfer = TransferEndpoint(config.transfer)
    await transfer.start()
    transfer.register(KV_REGION, kv)
    transfer.register(REQUEST_REGION, requests)
    service = AttentionService(
        state=AttentionState(process.service_id, kv.nbytes, requests.nbytes),
        transfer=transfer,
        kv=kv,
        requests=requests,
        process=process,
    )
    await process.bus.serve(process.subjects.attention_calls(process.service_id), BindAttention, service.bind)
    record = ServiceRecord(
        service_id=process.service_id,
        incarnation=process.incarnation,
        kind="attention",
        host=config.service.advertise_host,
        pid=os.getpid(),
        http_url=process.http_url,
    )
    return Running(record, service.drain, service.close)
