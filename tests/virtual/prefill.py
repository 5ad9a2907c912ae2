"""One life of a prefill instance in virtual time: its state with an emulated engine, driven as
``prefill.service`` does, over a memory that shows whose bytes lie where."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.emulation import EmulatedRunner
from common.errors import BusError, HandoverFailed, RequestError
from common.kv.blocks import BlockOwner
from common.messages import (
    Acknowledged,
    CancelRequest,
    ErrorReply,
    InstanceGone,
    KVDelivered,
    LoadReport,
    PrefillTask,
    PullKV,
    TokenBatch,
    error_reply,
)
from prefill import events
from prefill.engine import run_chunk
from prefill.state import ROOM, PrefillState
from tests.virtual.bus import Bus, Reply
from tests.virtual.decode import VirtualDecode
from tests.virtual.memory import LANDING_S, Memory

CALL_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class VirtualPrefill:
    state: PrefillState
    runner: EmulatedRunner
    bus: Bus
    memory: Memory
    send_failures: float
    _is_alive: bool = True
    _sends: dict[BlockOwner, list[Callable[[Reply], None]]] = field(default_factory=dict)
    _in_air: dict[BlockOwner, PullKV] = field(default_factory=dict)

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case CancelRequest():
                self._handle(events.CancelArrived(message.request_id, message.attempt))
            case InstanceGone():
                self._handle(events.DecodeInstanceGone(message.instance_id, message.incarnation))

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None:
        try:
            if isinstance(message, PrefillTask):
                self._handle(events.TaskArrived(message))
                reply(Acknowledged())
                return
            assert isinstance(message, PullKV)
            owner = BlockOwner(ROOM, message.request_id, message.attempt)
            if owner not in self._sends:
                self._handle(events.PullArrived(message))
            self._sends[owner].append(reply)
        except RequestError as exc:
            reply(exc)

    def drain(self, timeout_s: float) -> None:
        self._handle(events.DrainStarted())
        expired = events.DrainExpired()
        self.bus.timeline.after(timeout_s, lambda: self._handle(expired) if self._is_alive else None)

    def die(self) -> None:
        """Bytes in the air may land for a while."""
        self._is_alive = False
        for pull in self._in_air.values():
            self._spoil_soon(pull)

    def load(self, sequence: int) -> LoadReport:
        state = self.state
        return LoadReport(
            instance_id=state.instance_id,
            incarnation=state.incarnation,
            sequence=sequence,
            role="prefill",
            is_draining=not state.is_admitting,
            pending_prefill_tokens=state.pending_tokens,
            pending_prefill_requests=state.pending_requests,
            handovers_waiting=state.handovers_waiting,
            decode_running=0,
            decode_waiting=0,
            decode_tokens=0,
            total_blocks=state.blocks.total_blocks,
            free_blocks=state.blocks.free_blocks,
            prefill_tokens_per_s=1000.0,
        )

    def _handle(self, event: events.PrefillEvent) -> None:
        try:
            commands = self.state.handle(event, self.bus.timeline.now)
        finally:
            self.state.check()
        for command in commands:
            self._execute(command)

    def _execute(self, command: events.PrefillCommand) -> None:
        timeline = self.bus.timeline
        match command:
            case events.RunChunk(slices):
                step_s = 0.01 + 0.001 * sum(piece.tokens for piece in slices)
                timeline.after(step_s, lambda: self._end_chunk(slices))
            case events.PublishToken(gateway_id, event, _, _):
                batch = TokenBatch(self.state.instance_id, (event,))
                self.bus.publish(self.state.instance_id, gateway_id, batch)
            case events.PublishFailure(gateway_id, failure):
                self.bus.publish(self.state.instance_id, gateway_id, failure)
            case events.OfferSequence(owner, decode_instance, task):

                def answer(reply: Reply) -> None:
                    if isinstance(reply, RequestError):
                        self._handle(events.OfferRefused(owner, error_reply(reply)))
                    elif isinstance(reply, BusError):
                        lost = ErrorReply(HandoverFailed.code, "the decode instance did not answer")
                        self._handle(events.OfferRefused(owner, lost, is_lost=True))

                self.bus.call(self.state.instance_id, decode_instance, task, answer, CALL_TIMEOUT_S)
            case events.SendKV(owner, pull):
                self._sends[owner] = []
                self._in_air[owner] = pull
                receiver = self.bus.nodes.get(pull.decode_instance)
                timeline.after(timeline.chance.random() * 0.3, lambda: self._end_send(command, receiver))

    def _end_chunk(self, slices: tuple[events.ChunkSlice, ...]) -> None:
        if not self._is_alive:
            return
        for piece in slices:
            request_id = piece.owner.request_id
            self.memory.check(piece.block_table, request_id, piece.start)
            self.memory.write(piece.block_table, request_id, piece.start, piece.tokens)
        self._handle(events.ChunkFinished(run_chunk(self.runner, slices)))

    def _end_send(self, command: events.SendKV, receiver: object) -> None:
        if not self._is_alive:
            return
        owner, pull = command.owner, command.pull
        del self._in_air[owner]
        replies = self._sends.pop(owner)
        self.memory.check(command.source_blocks, owner.request_id, command.kv_tokens)
        is_there = (
            isinstance(receiver, VirtualDecode) and self.bus.nodes.get(pull.decode_instance) is receiver
        )
        is_delivered = is_there and self.bus.timeline.chance.random() >= self.send_failures
        if is_delivered:
            assert isinstance(receiver, VirtualDecode)
            receiver.memory.write(pull.blocks, owner.request_id, 0, command.kv_tokens)
        else:
            self._spoil_soon(pull)
        for reply in replies:
            reply(KVDelivered(1, 0.0) if is_delivered else HandoverFailed("the transfer failed"))
        self._handle(events.SendFinished(owner))

    def _spoil_soon(self, pull: PullKV) -> None:
        receiver = self.bus.nodes.get(pull.decode_instance)
        if isinstance(receiver, VirtualDecode):
            delay_s = self.bus.timeline.chance.random() * LANDING_S
            self.bus.timeline.after(delay_s, lambda: receiver.memory.spoil(pull.blocks))
