"""One life of a decode instance in virtual time: its state with an emulated engine, driven as
``decode.service`` does, over a memory that shows whose bytes lie where."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from common.emulation import EmulatedRunner
from common.errors import (
    BusTimeout,
    HandoverFailed,
    InstanceLost,
    KVLinkBroken,
    RequestCancelled,
    RequestError,
)
from common.ids import Incarnation, InstanceId, RequestId
from common.kv.blocks import BlockOwner
from common.kv.layout import KVLayout
from common.kv.link_watch import LinkWatch
from common.lifecycle import DecodePhase
from common.messages import (
    Acknowledged,
    CancelRequest,
    DecodeTask,
    ErrorReply,
    GatewayGone,
    InstanceGone,
    InstanceLife,
    KVDelivered,
    KVDestination,
    LeaveSequence,
    LengthPredicted,
    OfferDeclined,
    OfferWithdrawn,
    Placement,
    PlaceMoved,
    PullKV,
    ResumeTask,
    SequenceMoved,
    TokenBatch,
    error_reply,
)
from common.sequences import PublishFailure
from common.shared_engine import compute_together
from decode import events
from decode.engine import step_work
from decode.homes import HOME_RETRY_S
from decode.sequence import ROOM
from decode.state import DecodeState
from tests.virtual.bus import Bus, Reply
from tests.virtual.engine import VirtualEngine, VirtualWork
from tests.virtual.memory import Memory
from tests.virtual.scheduler import CALL_TIMEOUT_S, SCHEDULER

PULL_TIMEOUT_S = 10.0
INHERIT_S = 0.02
SWAP_S = 0.01
QUARANTINE_S = 2.0
LAYOUT = KVLayout(layers=3, kv_heads=1, head_dim=1, block_size=1, element_bytes=1)
"""Travels with a pull; the virtual memory knows tokens, not bytes."""


@dataclass(slots=True)
class KeptKV:
    """What attention workers keep of decode instances that died: each one's memory, and by request how many
    tokens of it lie in which blocks."""

    lives: dict[InstanceLife, tuple[Memory, dict[RequestId, tuple[int, tuple[int, ...]]]]] = field(
        default_factory=dict
    )
    copies: int = 0

    def has(self, task: ResumeTask) -> bool:
        _, held = self.lives.get(task.former, (None, {}))
        tokens, _ = held.get(task.request.request_id, (0, ()))
        return tokens >= task.request.tokens - 1

    def copy(
        self, former: InstanceLife, request_id: RequestId, tokens: int, into: Callable[[], None]
    ) -> None:
        memory, held = self.lives[former]
        memory.check(held[request_id][1], request_id, tokens)
        into()
        self.copies += 1


@dataclass(slots=True, eq=False)
class VirtualDecode:
    state: DecodeState
    incarnation: Incarnation
    runner: EmulatedRunner
    bus: Bus
    links: LinkWatch
    engine: VirtualEngine
    memory: Memory
    host_memory: Memory
    kept: KeptKV
    inherit_failures: float
    swaps: int = 0
    on_change: Callable[[], None] = lambda: None
    hand_on: Callable[[events.HandOn], None] = lambda _: None
    _is_alive: bool = True
    _pulls: dict[BlockOwner, InstanceGone] = field(default_factory=dict)

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case CancelRequest():
                self.handle(events.CancelArrived(message.request_id, message.attempt))
            case LeaveSequence():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                self.handle(events.LeaveAsked(owner, message.wanted))
            case OfferWithdrawn():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                source = (message.prefill_instance, message.prefill_incarnation)
                self.handle(events.OfferWithdrawn(owner, *source))
            case LengthPredicted():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                self.handle(events.LengthPredicted(owner, message.lengths))
            case InstanceGone():
                self.handle(events.PrefillGone(message.instance_id, message.incarnation))
                for owner, loss in list(self._pulls.items()):
                    if loss == message:
                        self._quarantine(owner, loss.instance_id)
            case GatewayGone():
                self.handle(events.GatewayGone(message.gateway_id))

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None:
        assert isinstance(message, DecodeTask | ResumeTask)
        try:
            if isinstance(message, DecodeTask):
                self.handle(events.TaskArrived(message))
            elif self.kept.has(message):
                self.handle(events.ResumeArrived(message, 0))
            else:
                raise HandoverFailed("no attention worker keeps the KV")
        except RequestError as exc:
            reply(exc)
        else:
            reply(Acknowledged())

    def drain(self, timeout_s: float) -> None:
        self.handle(events.DrainStarted())
        self._after(timeout_s, lambda: self.handle(events.DrainExpired()))

    def die(self) -> None:
        self._is_alive = False
        held = {
            owner.request_id: (sequence.position, tuple(self.state.blocks.block_table(owner)))
            for owner, sequence in self.state.sequences.items()
            if sequence.phase is DecodePhase.RUNNING
        }
        self.kept.lives[InstanceLife(self.state.instance_id, self.incarnation)] = (self.memory, held)

    def handle(self, event: events.DecodeEvent) -> None:
        try:
            commands = self.state.handle(event, self.bus.clock.now)
        finally:
            self.state.check()
        for command in commands:
            self._execute(command)
        self.on_change()

    def _execute(self, command: events.DecodeCommand) -> None:
        name = self.state.instance_id
        match command:
            case events.RunStep(rows):
                tables = [tuple(row.block_table) for row in rows]
                seconds = 0.03 + 0.002 * len(rows)
                work = VirtualWork(len(rows), seconds, lambda: self._end_step(rows, tables))
                self.engine.submit("decode", work)
            case events.PublishTokens(gateway_id, tokens):
                self.bus.publish(name, gateway_id, TokenBatch(name, tokens))
            case PublishFailure(gateway_id, failure):
                self.bus.publish(name, gateway_id, failure)
            case events.PullSequence(owner, prefill_instance, incarnation, blocks, portion, max_bytes):
                self._pulls[owner] = InstanceGone(prefill_instance, incarnation)
                pull = PullKV(
                    request_id=owner.request_id,
                    attempt=owner.attempt,
                    prefill_incarnation=incarnation,
                    decode_instance=name,
                    blocks=blocks,
                    layout=LAYOUT,
                    destinations=(KVDestination(b"", 0, 1, self.state.blocks.total_blocks),),
                    portion=portion,
                    max_bytes=max_bytes,
                )
                self._pull(owner, pull)
            case events.SwapOut(owner, blocks, host_blocks):
                self.swaps += 1
                copy = partial(self.memory.copy, blocks, self.host_memory, host_blocks)
                self._after(SWAP_S, lambda: self._end_swap(owner, copy))
            case events.SwapIn(owner, blocks, host_blocks):
                copy = partial(self.host_memory.copy, host_blocks, self.memory, blocks)
                self._after(SWAP_S, lambda: self._end_swap(owner, copy))
            case events.InheritSequence():
                self._after(INHERIT_S, lambda: self._inherit(command))
            case events.SeekHome():
                self._seek_home(command)
            case events.DeclineOffer(owner, prefill_instance, wanted):
                declined = OfferDeclined(owner.request_id, owner.attempt, name, wanted)
                self.bus.publish(name, prefill_instance, declined)
            case events.HandOn(owner, _, request, home):
                moved = SequenceMoved(owner.request_id, owner.attempt, home, len(request.output_ids))
                self.bus.publish(name, request.gateway_id, moved)
                self.hand_on(command)

    def _seek_home(self, command: events.SeekHome) -> None:
        owner = command.owner

        def answer(reply: Reply) -> None:
            if not self._is_alive:
                return
            if isinstance(reply, Placement):
                self.handle(events.HomeFound(owner, reply))
            elif self.state.departures.is_leaving:
                self._after(HOME_RETRY_S, lambda: self._seek_home(command))
            else:
                self.handle(events.SearchEnded(owner))

        if not self.state.departures.is_sought(owner):
            self.handle(events.SearchEnded(owner))
            return
        life = InstanceLife(self.state.instance_id, self.incarnation)
        call = PlaceMoved(command.request, life, command.wanted)
        self.bus.call(self.state.instance_id, SCHEDULER, call, answer, CALL_TIMEOUT_S)

    def _end_swap(self, owner: BlockOwner, copy: Callable[[], None]) -> None:
        if self.bus.chance.random() < self.inherit_failures:
            self.handle(events.SwapFailed(owner))
            return
        copy()
        self.handle(events.SwapFinished(owner, 1, SWAP_S))

    def _inherit(self, command: events.InheritSequence) -> None:
        owner, tokens = command.owner, command.tokens
        if self.bus.chance.random() < self.inherit_failures:
            error = ErrorReply(HandoverFailed.code, "the KV was dropped")
            self.handle(events.PullFailed(owner, error, is_drained=True))
            return
        self.kept.copy(
            command.former,
            owner.request_id,
            tokens,
            lambda: self.memory.write(command.blocks, owner.request_id, 0, tokens),
        )
        self.handle(events.PullFinished(owner))

    def _end_step(self, rows: tuple[events.StepRow, ...], tables: list[tuple[int, ...]]) -> None:
        for row, table in zip(rows, tables, strict=True):
            assert table == tuple(row.block_table), "a block table changed while the engine used it"
            self.memory.check(table, row.owner.request_id, row.position)
            self.memory.write(table, row.owner.request_id, row.position, 1)
        [tokens] = compute_together(self.runner, [step_work(rows)])
        self.handle(events.StepFinished(tokens))

    def _pull(self, owner: BlockOwner, pull: PullKV) -> None:
        def answer(reply: Reply) -> None:
            if owner not in self._pulls:
                return
            if isinstance(reply, BusTimeout):
                self._pull(owner, pull)
            elif isinstance(reply, KVDelivered):
                del self._pulls[owner]
                if reply.kv_bytes:
                    self.links.note_worked(sender, self.state.instance_id)
                measured = (reply.kv_bytes, reply.transfer_s)
                if reply.is_last:
                    self.handle(events.PullFinished(owner, reply.first_token, *measured))
                else:
                    self.handle(events.PortionPulled(owner, *measured))
            elif isinstance(reply, RequestCancelled):
                del self._pulls[owner]
                self.handle(events.SequenceEnded(owner))
            elif isinstance(reply, RequestError) and not isinstance(reply, HandoverFailed | InstanceLost):
                del self._pulls[owner]
                self.handle(events.PullFailed(owner, error_reply(reply), is_drained=True))
            else:
                if isinstance(reply, KVLinkBroken):
                    self.links.note_failed(sender, self.state.instance_id)
                self._quarantine(owner, None if isinstance(reply, RequestError) else sender)

        sender = self._pulls[owner].instance_id
        self.bus.call(self.state.instance_id, sender, pull, answer, PULL_TIMEOUT_S)

    def _quarantine(self, owner: BlockOwner, lost: InstanceId | None) -> None:
        del self._pulls[owner]
        error = ErrorReply(HandoverFailed.code, "the pull failed")
        self.handle(events.PullFailed(owner, error, is_drained=False, lost_instance=lost))
        self._after(QUARANTINE_S, lambda: self.handle(events.PullDrained(owner)))

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.bus.clock.after(delay_s, lambda: action() if self._is_alive else None)
