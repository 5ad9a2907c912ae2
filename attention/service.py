"""An attention worker: a process without weights that holds KV and computes attention over it.

Decode instances bind it over the bus. From then on one thread answers them through the exchange's memory, and
the event loop only watches who is still there.
"""

import asyncio
import contextlib
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from attention import state as decisions
from attention.engine import AttentionLoop, KeptKV, ServedLane, kept_kv
from attention.moves import MovedSequences
from attention.state import AttentionState, DropKV, KeepKV, StartServing, StopServing, TellDraining
from common.config import Config
from common.errors import EngineError, InternalError, LamellaError, ServiceError, UnknownRequest
from common.host_cores import open_host_cores
from common.ids import BindingId
from common.kv.endpoint import KV_REGION
from common.kv.pool import KVPool, allocate_pool
from common.messages import (
    Acknowledged,
    AreYouThere,
    AttentionDraining,
    InstanceEvent,
    InstanceGone,
    KVDelivered,
)
from common.messages.attention import (
    AttentionBound,
    AttentionCall,
    BindAttention,
    FindKV,
    HoldKV,
    InheritKV,
    KVFound,
    MoveKV,
    SettleKV,
    UnbindAttention,
    request_region,
    response_region,
)
from common.model.device import device_of
from common.model.exchange import Lane, Pace
from common.model.kernels import use_compiled
from common.service import Running, ServiceProcess, run_service
from common.telemetry import export_count, export_total
from common.thread_names import name_thread
from common.transfer.buffers import SharedBuffer, host_identity
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import PeerInfo, decode_peer_info, encode_peer_info
from common.transfer.mirror import MappedMirror, MooncakeMirror
from common.transfer.shared_memory import open_pidfd

log = logging.getLogger("lamella.attention")


@dataclass(slots=True)
class Served:
    """One binding's memory here (``offered``), its mirrors of the instance's, and what watches the latter."""

    peer: PeerInfo
    offered: PeerInfo
    pool: KVPool
    moves: MovedSequences
    lanes: list[ServedLane]
    pinned: list[Lane]
    mirrors: dict[str, MappedMirror | MooncakeMirror]
    pidfd: int | None


@dataclass(slots=True)
class AttentionService:
    state: AttentionState
    transfer: TransferEndpoint
    process: ServiceProcess
    device: torch.device
    loop: AttentionLoop = field(init=False)
    _served: dict[BindingId, Served] = field(default_factory=dict)
    _kept: dict[BindingId, KeptKV] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _changes: asyncio.Lock = field(default_factory=asyncio.Lock)

    def start(self) -> None:
        main = asyncio.get_running_loop()

        def on_failure(binding_id: BindingId, error: Exception) -> None:
            # A LamellaError says all there is to say; anything else needs its place.
            trace = None if isinstance(error, LamellaError) else error
            fields = {"binding": binding_id, "error": f"{type(error).__name__}: {error}"}
            log.warning("binding_failed", extra=fields, exc_info=trace)
            main.call_soon_threadsafe(self._note, decisions.BindingFailed(binding_id))

        threads = self.process.config.model.threads
        if threads is None:
            self.loop = AttentionLoop(on_failure, open_host_cores("attention"))
        else:
            self.loop = AttentionLoop(on_failure, threads=threads)
        end: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_loop, args=(end,), name="attention", daemon=True)
        self._thread.start()
        self.process.spawn(self._watch_thread(asyncio.wrap_future(end)))
        self._export_counts()

    def _export_counts(self) -> None:
        """What is held for instances, and what is on its way: the former ends with them, the latter soon."""
        count = partial(export_count, self.process.registry)
        count("attention_bindings", "Bindings whose memory is held.", lambda: len(self._served))
        count("attention_pools_kept", "KV pools kept of instances that are lost.", lambda: len(self._kept))
        count(
            "kv_moves",
            "Sequences whose KV is on its way.",
            lambda: sum(served.moves.under_way for served in self._served.values()),
        )
        count("transfers_open", "Transfers that have not settled.", lambda: self.transfer.outstanding)
        count("attention_kv_bytes", "Of the KV pools held, for bindings and of lost ones.", self._kv_bytes)
        help_text = "Decode steps whose attention was computed here."
        export_total(self.process.registry, "attention_steps", help_text, lambda: self.loop.steps)

    def _kv_bytes(self) -> int:
        pools = [each.pool for each in self._served.values()] + [each.pool for each in self._kept.values()]
        return sum(pool.nbytes for pool in pools)

    def _run_loop(self, end: "Future[None]") -> None:
        name_thread("attention")
        # Who waits for its end may be cancelled first.
        if not end.set_running_or_notify_cancel():
            return
        try:
            self.loop.run()
        except Exception as exc:
            end.set_exception(exc)
        else:
            end.set_result(None)

    async def _watch_thread(self, end: "asyncio.Future[None]") -> None:
        """Without its thread the worker answers nobody, while its lease says that it is there: it ends."""
        try:
            await end
        except Exception as exc:
            raise EngineError(f"the attention thread ended: {type(exc).__name__}: {exc}") from exc

    async def answer(self, call: AttentionCall) -> AttentionBound | Acknowledged | KVFound | KVDelivered:
        """Raises Overloaded, NoInstanceReady, InvalidRequest, InternalError; of KV that is kept or moves:
        UnknownRequest, HandoverFailed."""
        match call:
            case BindAttention():
                return await self._bind(call)
            case UnbindAttention(binding_id):
                await self._carry_out(decisions.UnbindArrived(binding_id))
                return Acknowledged()
            case FindKV():
                return await self._find(call)
            case InheritKV():
                return await self._inherit(call)
            case MoveKV():
                return await self._moves_of(call.binding_id).send(call)
            case HoldKV():
                self._moves_of(call.binding_id).take(call)
                return Acknowledged()
            case SettleKV(binding_id, key):
                if binding_id in self._served:
                    await self._served[binding_id].moves.wait_settled(key)
                return Acknowledged()
            case AreYouThere():
                return Acknowledged()

    def take_event(self, message: InstanceEvent) -> None:
        if isinstance(message, InstanceGone):
            self._note(decisions.InstanceLost(message.instance_id, message.incarnation))

    async def _bind(self, bind: BindAttention) -> AttentionBound:
        try:
            offered = await self._carry_out(decisions.BindArrived(bind))
        except (ServiceError, OSError, torch.OutOfMemoryError) as exc:
            await self._carry_out(decisions.UnbindArrived(bind.binding_id))
            raise InternalError(f"the binding's memory: {exc}") from exc
        assert offered is not None
        log.info("attention_bound", extra={"instance": bind.decode_instance, "binding": bind.binding_id})
        return offered

    async def _find(self, call: FindKV) -> KVFound:
        """Who asks has heard of that life's end, be it before this worker."""
        former = call.former
        await self._carry_out(decisions.InstanceLost(former.instance_id, former.incarnation))
        async with self._changes:
            return KVFound(self._kept[self.state.kept_for(call.binding_id, former)].tokens(call.key))

    async def _inherit(self, call: InheritKV) -> Acknowledged:
        # Neither pool goes amid the copy, and one that is asked for again comes after the first.
        async with self._changes:
            kept = self._kept[self.state.kept_for(call.binding_id, call.former)]
            pool = self._served[call.binding_id].pool
            await asyncio.to_thread(kept.copy_to, pool, call.key, call.tokens, call.blocks)
        return Acknowledged()

    def _moves_of(self, binding_id: BindingId) -> MovedSequences:
        if binding_id not in self._served:
            raise UnknownRequest(f"attention worker {self.state.worker_id} serves no binding {binding_id}")
        return self._served[binding_id].moves

    def _note(self, event: decisions.AttentionEvent) -> None:
        self.process.spawn(self._carry_out_alone(event))

    async def _carry_out_alone(self, event: decisions.AttentionEvent) -> None:
        await self._carry_out(event)

    async def _carry_out(self, event: decisions.AttentionEvent) -> AttentionBound | None:
        bound = None
        async with self._changes:
            for command in self.state.handle(event):
                match command:
                    case StartServing():
                        bound = await self._serve(command)
                    case StopServing(binding_id):
                        await self._stop_serving(binding_id)
                    case KeepKV(binding_id, keep_s):
                        await self._keep(binding_id, keep_s)
                    case DropKV(binding_id):
                        if self._kept.pop(binding_id, None) is not None:
                            log.info("attention_kv_dropped", extra={"binding": binding_id})
                    case TellDraining(binding_id, decode_instance):
                        told = AttentionDraining(self.process.service_id, binding_id)
                        self.process.bus.publish(self.process.subjects.instance_events(decode_instance), told)
            self._note_idle()
        return bound

    def _note_idle(self) -> None:
        if self.state.bindings or self._served:
            self._idle.clear()
        else:
            self._idle.set()

    async def _serve(self, command: StartServing) -> AttentionBound:
        bind = command.bind
        peer = decode_peer_info(bind.endpoint)
        layout, shape = bind.layout, bind.shape
        dtype: torch.dtype = getattr(torch, shape.element_type)
        with contextlib.ExitStack() as given_up:
            pool, kv = allocate_pool(layout, command.total_blocks, dtype, self.device)
            if isinstance(kv, SharedBuffer):
                given_up.callback(kv.close)
            requests = []
            for _ in range(bind.lanes):
                requests.append(SharedBuffer(shape.request_bytes, "lamella-attention"))
                given_up.callback(requests[-1].close)
            regions = {request_region(lane): buffer for lane, buffer in enumerate(requests)}
            offered = self.transfer.offer({KV_REGION: kv, **regions})
            given_up.pop_all()
        moves = MovedSequences(
            self.transfer, f"{offered.incarnation}/{KV_REGION}", layout, command.total_blocks
        )
        served = Served(peer, offered, pool, moves, [], [], {}, None)
        self._served[bind.binding_id] = served
        pace = self._new_pace()
        for index, request in enumerate(requests):
            name = response_region(index)
            mirror = await self.transfer.mirror(peer, name)
            served.mirrors[name] = mirror
            lane = Lane(shape, request.memory, mirror.memory, mirror, bind.salt, pace)
            if self.device.type != "cpu":
                lane.pin()
                served.pinned.append(lane)
            served.lanes.append(ServedLane(bind.binding_id, lane, pool, bind.attention_specs))
        self._watch(bind, served)
        self.loop.add(served.lanes)
        return AttentionBound(encode_peer_info(offered), command.total_blocks)

    def _new_pace(self) -> Pace | None:
        """Of an emulated link to one instance."""
        config = self.process.config.transfer
        if config.emulated_bandwidth_bytes_per_s is None and config.emulated_latency_s == 0:
            return None
        return Pace(config.emulated_bandwidth_bytes_per_s, config.emulated_latency_s)

    def _watch(self, bind: BindAttention, served: Served) -> None:
        """On one host the kernel tells of the instance's end; across hosts the scheduler does."""
        if served.peer.host != host_identity():
            return
        served.pidfd = open_pidfd(served.peer)
        lost = decisions.InstanceLost(bind.decode_instance, bind.decode_incarnation)
        running = asyncio.get_running_loop()

        def on_exit(pidfd: int = served.pidfd) -> None:
            running.remove_reader(pidfd)
            self._note(lost)

        running.add_reader(served.pidfd, on_exit)

    async def _keep(self, binding_id: BindingId, keep_s: float) -> None:
        served = await self._stop_serving(binding_id)
        if served is None:
            # Its memory could not be had, and its end was told before whoever asked for it heard of that.
            self.state.handle(decisions.KeepExpired(binding_id))
            return
        kept = kept_kv(served.lanes, served.pool)
        self._kept[binding_id] = replace(kept, held=served.moves.corrected(kept.held))
        sequences = len(self._kept[binding_id].held)
        log.info("attention_kv_kept", extra={"binding": binding_id, "sequences": sequences})

        async def expire() -> None:
            await asyncio.sleep(keep_s)
            await self._carry_out(decisions.KeepExpired(binding_id))

        self.process.spawn(expire())

    async def _stop_serving(self, binding_id: BindingId) -> Served | None:
        """What was served; None where it never came to that. Who has mapped its memory can still write there:
        into blocks whose sequences were on their way, and were in no step.

        What leaves it may wait for its target for long. Other instances, and whoever asks for this KV, do
        not: the memory is given back later."""
        await asyncio.to_thread(self.loop.remove, binding_id)
        served = self._served.get(binding_id)
        if served is None:
            return None
        served.moves.end()
        for served_lane in served.lanes:
            served_lane.close()
        if served.pidfd is not None:
            asyncio.get_running_loop().remove_reader(served.pidfd)
            os.close(served.pidfd)
        for lane in served.pinned:
            lane.unpin()
        for name, mirror in served.mirrors.items():
            await self.transfer.close_mirror(served.peer, name, mirror)
        self.process.spawn(self._give_back(binding_id, served))
        return served

    async def _give_back(self, binding_id: BindingId, served: Served) -> None:
        await served.moves.wait_ended()
        self.transfer.withdraw(served.offered)
        del self._served[binding_id]
        log.info("attention_unbound", extra={"binding": binding_id})
        self._note_idle()

    async def drain(self, timeout_s: float) -> None:
        """Serves on until every instance has given it up: its sequences finish with their KV."""
        await self._carry_out(decisions.DrainStarted())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                return
        log.warning("drain_expired", extra={"bindings": len(self.state.bindings)})

    async def close(self) -> None:
        self.loop.stop()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await self.transfer.close()


async def run_attention(config: Config) -> None:
    """Runs one attention worker until it is told to stop."""
    await run_service(config, "attention", _start)


async def _start(process: ServiceProcess) -> Running:
    config = process.config
    settings = config.attention
    device = await asyncio.to_thread(device_of, "attention.device", settings.device)
    if config.model.kernels == "auto" and device.type == "cpu":
        await asyncio.to_thread(use_compiled, config.model.cache_directory)
    transfer = TransferEndpoint(config.transfer)
    await transfer.start()
    state = AttentionState(
        process.service_id, settings.kv_bytes, settings.exchange_bytes, settings.decode_instances
    )
    service = AttentionService(state, transfer, process, device)
    service.start()
    await process.bus.serve(
        process.subjects.attention_calls(process.service_id), AttentionCall, service.answer
    )
    await process.bus.subscribe(process.subjects.everyone(), InstanceEvent, service.take_event)
    return Running(process.record("attention"), service.drain, service.close)
