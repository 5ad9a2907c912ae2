"""One life of a prefill instance in virtual time: its state with an emulated engine, driven as
``prefill.service`` does, over a memory that shows whose bytes lie where."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.emulation import EmulatedRunner
from common.errors import BusError, HandoverFailed, KVLinkBroken, RequestError
from common.ids import InstanceId
from common.kv.blocks import BlockOwner
from common.kv.link_watch import LinkWatch
from common.messages import (
    Acknowledged,
    CancelRequest,
    ErrorReply,
    GatewayGone,
    InstanceGone,
    InstanceLife,
    OfferDeclined,
    OfferWithdrawn,
    Placement,
    PlaceMoved,
    PrefillTask,
    PullKV,
    TokenBatch,
    as_request_error,
    error_reply,
)
from common.sequences import PublishFailure
from common.shared_engine import compute_together
from prefill import events
from prefill.engine import chunk_work
from prefill.sequence import ROOM
from prefill.state import PrefillState
from tests.virtual.bus import Bus, Reply
from tests.virtual.decode import LAYOUT
from tests.virtual.engine import VirtualEngine, VirtualWork
from tests.virtual.memory import LANDING_S, HasMemory, Memory
from tests.virtual.scheduler import SCHEDULER

CALL_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class VirtualPrefill:
    """``cut``: whose links carry no KV now. ``failed_sends``: since the start of this life."""

    state: PrefillState
    runner: EmulatedRunner
    bus: Bus
    memory: Memory
    links: LinkWatch
    engine: VirtualEngine
    cut: set[InstanceId]
    send_failures: float
    failed_sends: int = 0
    on_change: Callable[[], None] = lambda: None
    keep_here: Callable[[events.KeepHere], None] = lambda _: None
    _is_alive: bool = True
    _pulls: dict[tuple[BlockOwner, int], list[Callable[[Reply], None]]] = field(default_factory=dict)
    _chunk: tuple[events.ChunkSlice, ...] = ()
    _layers: int = 0
    _in_air: dict[BlockOwner, tuple[PullKV, object]] = field(default_factory=dict)
    """With whose life it is written to: into the memory of the next one nothing comes."""

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case CancelRequest():
                self.handle(events.CancelArrived(message.request_id, message.attempt))
            case OfferDeclined():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                self.handle(events.OfferDeclined(owner, message.decode_instance, message.wanted))
            case InstanceGone():
                self.handle(events.DecodeInstanceGone(message.instance_id, message.incarnation))
            case GatewayGone():
                self.handle(events.GatewayGone(message.gateway_id))

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None:
        try:
            if isinstance(message, PrefillTask):
                self.handle(events.TaskArrived(message))
                reply(Acknowledged())
                return
            assert isinstance(message, PullKV)
            owner = BlockOwner(ROOM, message.request_id, message.attempt)
            key = (owner, message.portion)
            is_asked = key in self._pulls
            self._pulls.setdefault(key, []).append(reply)
            if not is_asked:
                try:
                    self.handle(events.PullArrived(message))
                except RequestError:
                    del self._pulls[key]
                    raise
        except RequestError as exc:
            reply(exc)

    def drain(self, timeout_s: float) -> None:
        self.handle(events.DrainStarted())
        expired = events.DrainExpired()
        self.bus.clock.after(timeout_s, lambda: self.handle(expired) if self._is_alive else None)

    def die(self) -> None:
        """Bytes in the air may land for a while."""
        self._is_alive = False
        for pull, receiver in self._in_air.values():
            self._spoil_soon(pull, receiver)

    def handle(self, event: events.PrefillEvent) -> None:
        try:
            commands = self.state.handle(event, self.bus.clock.now)
        finally:
            self.state.check()
        for command in commands:
            self._execute(command)
        self.on_change()

    def _execute(self, command: events.PrefillCommand) -> None:
        clock = self.bus.clock
        match command:
            case events.RunChunk(slices, report_every):
                tokens = sum(piece.tokens for piece in slices)
                self._chunk, self._layers = slices, 0
                layers = 0 if report_every is None else LAYOUT.layers
                self.engine.submit(
                    "prefill",
                    VirtualWork(
                        tokens,
                        0.01 + 0.001 * tokens,
                        lambda: self._end_chunk(slices),
                        lambda pass_s: self._begin_layers(layers, pass_s),
                    ),
                )
            case events.PublishToken(gateway_id, event, _, _):
                batch = TokenBatch(self.state.instance_id, (event,))
                self.bus.publish(self.state.instance_id, gateway_id, batch)
            case PublishFailure(gateway_id, failure):
                self.bus.publish(self.state.instance_id, gateway_id, failure)
            case events.PublishMove(gateway_id, moved):
                self.bus.publish(self.state.instance_id, gateway_id, moved)
            case events.KeepHere():
                self.keep_here(command)
            case events.SeekDecode():
                self._seek_decode(command)
            case events.OfferSequence(owner, decode_instance, task):

                def answer(reply: Reply) -> None:
                    if isinstance(reply, RequestError):
                        self.handle(events.OfferRefused(owner, error_reply(reply), is_early=task.is_early))
                    elif isinstance(reply, BusError):
                        lost = ErrorReply(HandoverFailed.code, "the decode instance did not answer")
                        self.handle(events.OfferRefused(owner, lost, is_lost=True, is_early=task.is_early))

                self.bus.call(self.state.instance_id, decode_instance, task, answer, CALL_TIMEOUT_S)
            case events.WithdrawOffer(owner, decode_instance):
                withdrawn = OfferWithdrawn(
                    owner.request_id, owner.attempt, self.state.instance_id, self.state.incarnation
                )
                self.bus.publish(self.state.instance_id, decode_instance, withdrawn)
            case events.AnswerPull(owner, portion, answered):
                for reply in self._pulls.pop((owner, portion)):
                    reply(as_request_error(answered) if isinstance(answered, ErrorReply) else answered)
            case events.SendKV(owner, pull):
                self._check_source(command)
                receiver = self.bus.nodes.get(pull.decode_instance)
                self._in_air[owner] = pull, receiver
                clock.after(self.bus.chance.random() * 0.3, lambda: self._end_send(command, receiver))

    def _seek_decode(self, command: events.SeekDecode) -> None:
        owner = command.owner

        def answer(reply: Reply) -> None:
            if isinstance(reply, Placement):
                self.handle(events.DecodeFound(owner, reply))
            elif isinstance(reply, RequestError):
                self.handle(events.DecodeNotFound(owner, error_reply(reply)))
            else:
                silent = ErrorReply(HandoverFailed.code, "the scheduler did not answer")
                self.handle(events.DecodeNotFound(owner, silent))

        life = InstanceLife(self.state.instance_id, self.state.incarnation)
        call = PlaceMoved(command.request, life, command.wanted, command.refused)
        self.bus.call(self.state.instance_id, SCHEDULER, call, answer, CALL_TIMEOUT_S)

    def _end_chunk(self, slices: tuple[events.ChunkSlice, ...]) -> None:
        if not self._is_alive:
            return
        self._chunk, self._layers = (), 0
        for piece in slices:
            request_id = piece.owner.request_id
            self.memory.check(piece.block_table, request_id, piece.start)
            self.memory.write(piece.block_table, request_id, piece.start, piece.tokens)
        [tokens] = compute_together(self.runner, [chunk_work(slices)])
        self.handle(events.ChunkFinished(tokens))

    def _begin_layers(self, layers: int, pass_s: float) -> None:
        for layer in range(layers):
            self.bus.clock.after(pass_s * (layer + 1) / layers, self._end_layer)

    def _end_layer(self) -> None:
        if self._is_alive:
            self._layers += 1
            self.handle(events.LayersComputed(self._layers))

    def _check_source(self, command: events.SendKV) -> None:
        """What is to be sent stands in the pool, or in the chunk's layers that are computed."""
        pieces = [piece for piece in self._chunk if piece.owner == command.owner]
        for span in command.spans:
            if pieces and span.positions.stop > pieces[0].start:
                [piece] = pieces
                assert span.positions.stop <= piece.start + piece.tokens
                assert span.layers.stop <= self._layers
            else:
                stop = span.positions.stop
                self.memory.check(command.source_blocks, command.owner.request_id, stop)

    def _end_send(self, command: events.SendKV, receiver: object) -> None:
        if not self._is_alive:
            return
        owner, pull = command.owner, command.pull
        del self._in_air[owner]
        is_same_life = self.bus.nodes.get(pull.decode_instance) is receiver
        ends = (self.state.instance_id, pull.decode_instance)
        is_there = is_same_life and isinstance(receiver, HasMemory) and self.cut.isdisjoint(ends)
        if is_there and self.bus.chance.random() >= self.send_failures:
            assert isinstance(receiver, HasMemory)
            for span in command.spans:
                receiver.memory.write_layers(pull.blocks, owner.request_id, span, LAYOUT.layers)
            parts = sum(len(span.layers) * len(span.positions) for span in command.spans)
            self.links.note_worked(*ends)
            self.handle(events.SendFinished(owner, parts * LAYOUT.token_layer_bytes, 0.001))
        else:
            self._spoil_soon(pull, receiver)
            self.failed_sends += 1
            self.handle(events.SendFailed(owner, ErrorReply(KVLinkBroken.code, "the transfer failed")))

    def _spoil_soon(self, pull: PullKV, receiver: object) -> None:
        if isinstance(receiver, HasMemory):
            delay_s = self.bus.chance.random() * LANDING_S
            self.bus.clock.after(delay_s, lambda: receiver.memory.spoil(pull.blocks))
