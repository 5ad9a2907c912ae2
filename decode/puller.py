"""Has a sequence's KV brought from the prefill instance that computed it, portion by portion.

The prefill instance writes it and answers when nothing of it is in the air. One that does not answer may
still write: the blocks stay reserved until it has settled.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from common.bus import Bus
from common.errors import (
    BusError,
    BusTimeout,
    BusUnavailable,
    HandoverFailed,
    InstanceLost,
    InternalError,
    KVLinkBroken,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from common.ids import InstanceId
from common.kv.blocks import BlockOwner, in_pool, pool_of
from common.kv.endpoint import KVEndpoint
from common.kv.link_watch import LinkWatch
from common.messages import ErrorReply, InstanceGone, KVDelivered, PullKV, error_reply
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import PULL_KV
from common.transfer.interface import SOCKET_GRACE_S
from decode.events import DecodeEvent, PullDrained, PullFailed, PullSequence, SequenceEnded
from decode.settling import RECONNECT_BACKOFF_S, wait_settled

log = logging.getLogger("lamella.decode")

Call = asyncio.Task[KVDelivered]


@dataclass(frozen=True, slots=True)
class Puller:
    """``instance_id`` asks; an answer may take ``timeout_s``. ``links``: what carries KV to it."""

    instance_id: InstanceId
    bus: Bus
    subjects: Subjects
    kv: KVEndpoint
    links: LinkWatch
    timeout_s: float
    _under_way: dict[BlockOwner, tuple[InstanceGone, Call]] = field(default_factory=dict)

    async def carry_out(
        self,
        command: PullSequence,
        handle: Callable[[DecodeEvent], None],
        take: Callable[[PullSequence, KVDelivered], None],
    ) -> None:
        """Asks until the prefill instance answers for certain: ``take`` gets what it delivered. Otherwise
        ``handle`` is told what went wrong, and when nothing can land any more."""
        owner, began_ns = command.owner, timeline.begin()
        pull = self._pull_of(command)
        call = asyncio.create_task(self._ask_until_certain(command.prefill_instance, pull))
        self._under_way[owner] = (InstanceGone(command.prefill_instance, command.prefill_incarnation), call)
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()
            del self._under_way[owner]
        is_delivered = not call.cancelled() and call.exception() is None
        timeline.end(
            began_ns,
            PULL_KV,
            owner.attempt,
            command.portion,
            call.result().kv_bytes if is_delivered else 0,
            requests=owner.request_id,
            peer=command.prefill_instance,
        )
        if is_delivered:
            if call.result().kv_bytes:
                self.links.note_worked(command.prefill_instance, self.instance_id)
            take(command, call.result())
        else:
            await self._fail(command, pull, call, handle)

    def give_up(self, gone: InstanceGone) -> None:
        """What it was asked for does not come any more."""
        for source, call in list(self._under_way.values()):
            if source == gone:
                call.cancel()

    def _pull_of(self, command: PullSequence) -> PullKV:
        return PullKV(
            request_id=command.owner.request_id,
            attempt=command.owner.attempt,
            prefill_incarnation=command.prefill_incarnation,
            decode_instance=self.instance_id,
            blocks=in_pool(command.blocks),
            layout=self.kv.layout,
            destinations=self.kv.destinations(pool_of(command.blocks[0])),
            portion=command.portion,
            max_bytes=command.max_bytes,
        )

    async def _ask_until_certain(self, prefill_instance: InstanceId, pull: PullKV) -> KVDelivered:
        while True:
            try:
                return await self._ask(prefill_instance, pull)
            except BusTimeout:
                log.warning("pull_asked_again", extra={"request": pull.request_id})
            except (BusUnavailable, Overloaded):
                await asyncio.sleep(RECONNECT_BACKOFF_S)

    async def _ask(self, prefill_instance: InstanceId, pull: PullKV) -> KVDelivered:
        subject = self.subjects.instance_calls(prefill_instance)
        return await self.bus.call(subject, pull, KVDelivered, self.timeout_s)

    async def _fail(
        self, command: PullSequence, pull: PullKV, call: Call, handle: Callable[[DecodeEvent], None]
    ) -> None:
        """Raises what is neither the bus's nor the prefill instance's fault."""
        owner, source = command.owner, command.prefill_instance
        if call.cancelled():
            lost = ErrorReply(HandoverFailed.code, f"prefill instance {source} is gone")
            handle(PullFailed(owner, lost, is_drained=False, lost_instance=source))
            await self._quarantine(command, pull, handle)
            return
        error = call.exception()
        if isinstance(error, BusError | InternalError):
            log.warning("pull_failed", extra={"request": owner.request_id, "error": str(error)})
            reply = ErrorReply(HandoverFailed.code, f"the pull failed: {error}")
            lost_instance = source if isinstance(error, BusError) else None
            handle(PullFailed(owner, reply, is_drained=False, lost_instance=lost_instance))
            await self._quarantine(command, pull, handle)
        elif isinstance(error, HandoverFailed | InstanceLost):
            log.warning("pull_failed", extra={"request": owner.request_id, "error": str(error)})
            if isinstance(error, KVLinkBroken):
                # Before the gateway is told: a scheduler that places it anew has heard of it.
                self.links.note_failed(source, self.instance_id)
            handle(PullFailed(owner, error_reply(error), is_drained=False))
            await self._rest(owner, handle)
        elif isinstance(error, RequestCancelled):
            handle(SequenceEnded(owner))
        elif isinstance(error, RequestError):
            handle(PullFailed(owner, error_reply(error), is_drained=True))
        elif error is not None:
            raise error

    async def _quarantine(
        self, command: PullSequence, pull: PullKV, handle: Callable[[DecodeEvent], None]
    ) -> None:
        """The sender does not answer. It may be dead, or stopped and about to go on writing: its destination
        stays reserved until it, or its next life, says that nothing is in the air, or it has ended."""
        await wait_settled(command.sender, lambda: self._ask(command.prefill_instance, pull))
        await self._rest(command.owner, handle)

    async def _rest(self, owner: BlockOwner, handle: Callable[[DecodeEvent], None]) -> None:
        """What a sender that has given up left in its sockets may still arrive."""
        await asyncio.sleep(SOCKET_GRACE_S)
        handle(PullDrained(owner))
