"""One attention worker bound to this decode instance: memory on both sides, and what goes through it."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from common.bus import Bus
from common.errors import BusError, InvalidRequest, RequestError, ServiceError, TransferError
from common.ids import BindingId, Incarnation, InstanceId, new_binding_id
from common.messages import Acknowledged, KVDestination, ServiceRecord
from common.messages.attention import (
    AttentionBound,
    BindAttention,
    UnbindAttention,
    request_region,
    response_region,
)
from common.model.exchange import Lane, Pace
from common.subjects import Subjects
from common.transfer.buffers import SharedBuffer, host_identity
from common.transfer.endpoint import TransferEndpoint
from common.transfer.interface import PeerInfo, decode_peer_info, encode_peer_info
from common.transfer.mirror import MappedMirror, MooncakeMirror
from common.transfer.shared_memory import open_pidfd
from decode.attention_needs import AttentionNeeds
from decode.process_exit import has_exited
from decode.remote_attention import WorkerExchange

SALT_BITS = 61
"""Leaves room for a counter in a signed word."""


class AttentionUnavailable(ServiceError):
    """Workers refuse what this instance needs, whenever they are asked, or there are too few."""


class AttentionNotFree(ServiceError):
    """A worker that is taken, drains or cannot be reached: later it may serve this instance."""


@dataclass(slots=True)
class Binding:
    """A worker that serves this instance. ``destination``: where KV for its heads goes. ``given_up_s``: since
    when it is to serve no more, and has not said that it does not."""

    record: ServiceRecord
    binding_id: BindingId
    exchange: WorkerExchange
    destination: KVDestination
    peer: PeerInfo
    offered: PeerInfo
    mirrors: dict[str, MappedMirror | MooncakeMirror]
    pidfd: int | None
    given_up_s: float | None = None


@dataclass(frozen=True, slots=True)
class Binder:
    """Binds and unbinds workers for one life of a decode instance. ``new_pace``: an emulated link's."""

    instance_id: InstanceId
    incarnation: Incarnation
    needs: AttentionNeeds
    transfer: TransferEndpoint
    bus: Bus
    subjects: Subjects
    call_timeout_s: float
    new_pace: Callable[[], Pace | None]

    async def bind(self, record: ServiceRecord, index: int) -> Binding:
        """The worker as number ``index`` of its pool.

        Raises AttentionUnavailable for what no later try would change, else AttentionNotFree.
        """
        share = self.needs.share(index)
        responses = {
            response_region(lane): SharedBuffer(share.shape.response_bytes, "lamella-attention")
            for lane in range(self.needs.lanes)
        }
        offered = self.transfer.offer(responses)
        message = BindAttention(
            binding_id=new_binding_id(),
            decode_instance=self.instance_id,
            decode_incarnation=self.incarnation,
            layout=share.layout,
            first_head=share.kv_heads.start,
            attention_specs=share.attention_specs,
            shape=share.shape,
            lanes=self.needs.lanes,
            endpoint=encode_peer_info(offered),
            salt=secrets.randbits(SALT_BITS),
        )
        mirrors: dict[str, MappedMirror | MooncakeMirror] = {}
        peer: PeerInfo | None = None
        pace = self.new_pace()
        try:
            subject = self.subjects.attention_calls(record.service_id)
            answer = await self.bus.call(subject, message, AttentionBound, self.call_timeout_s)
            peer = decode_peer_info(answer.endpoint)
            lanes = []
            for lane in range(self.needs.lanes):
                name = request_region(lane)
                mirror = mirrors[name] = await self.transfer.mirror(peer, name)
                response = responses[response_region(lane)].memory
                lanes.append(Lane(share.shape, mirror.memory, response, mirror, message.salt, pace))
            pidfd = open_pidfd(peer) if peer.host == host_identity() else None
        except (BusError, TransferError, RequestError) as exc:
            await self._give_up(record, message.binding_id, peer, offered, mirrors)
            refused = AttentionUnavailable if isinstance(exc, InvalidRequest) else AttentionNotFree
            raise refused(f"attention worker {record.service_id}: {exc}") from exc
        exchange = WorkerExchange(
            record.service_id, share.heads, share.kv_heads, tuple(lanes), has_exited(pidfd)
        )
        heads = share.kv_heads
        destination = KVDestination(answer.endpoint, heads.start, len(heads), answer.total_blocks)
        return Binding(record, message.binding_id, exchange, destination, peer, offered, mirrors, pidfd)

    async def unbind(self, binding: Binding) -> bool:
        """Whether the worker has given up the binding; it holds its memory until then. No step uses it."""
        if not await self._tell(binding.record, binding.binding_id):
            return False
        await self.forget(binding)
        return True

    async def forget(self, binding: Binding) -> None:
        """Gives this side's memory back: the worker has ended, or does not use it any more."""
        if binding.pidfd is not None:
            os.close(binding.pidfd)
            binding.pidfd = None
        await self._free(binding.peer, binding.offered, binding.mirrors)

    async def _give_up(
        self,
        record: ServiceRecord,
        binding_id: BindingId,
        peer: PeerInfo | None,
        offered: PeerInfo,
        mirrors: dict[str, MappedMirror | MooncakeMirror],
    ) -> None:
        await self._tell(record, binding_id)
        await self._free(peer, offered, mirrors)

    async def _tell(self, record: ServiceRecord, binding_id: BindingId) -> bool:
        subject = self.subjects.attention_calls(record.service_id)
        try:
            await self.bus.call(subject, UnbindAttention(binding_id), Acknowledged, self.call_timeout_s)
        except (BusError, RequestError):
            return False
        return True

    async def _free(
        self, peer: PeerInfo | None, offered: PeerInfo, mirrors: dict[str, MappedMirror | MooncakeMirror]
    ) -> None:
        for name, mirror in mirrors.items():
            assert peer is not None
            await self.transfer.close_mirror(peer, name, mirror)
        self.transfer.withdraw(offered)
