"""The prefill room's voice: messages in, events to the state, its commands out to engine, bus and transfer.

Everything here runs on the event loop; only ``prefill.engine`` runs elsewhere. An event is handled to its
end before the next one, so the state needs no lock.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

import msgspec

from common.bus import Bus
from common.errors import (
    BusError,
    HandoverFailed,
    InternalError,
    InvalidRequest,
    KVLinkBroken,
    RequestError,
    TransferError,
)
from common.ids import GatewayId, InstanceId
from common.instance_metrics import InstanceMetrics
from common.kv.blocks import BlockOwner
from common.kv.endpoint import KVEndpoint
from common.kv.link_watch import LinkWatch
from common.messages import (
    Acknowledged,
    CancelRequest,
    ErrorReply,
    GatewayEvent,
    GatewayGone,
    InstanceEvent,
    InstanceGone,
    InstanceLife,
    KVDelivered,
    OfferDeclined,
    OfferWithdrawn,
    Placement,
    PlaceMoved,
    PrefillTask,
    PullKV,
    TokenBatch,
    TokenEvent,
    Work,
    as_request_error,
    error_reply,
)
from common.performance import PromptTime
from common.redelivery import publish_surely
from common.room_spans import RoomSpans
from common.sequences import PublishFailure
from common.shared_engine import Computed, SharedEngine
from common.spans import Attributes, spans
from common.steps import LayerReports
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import DECIDE, OFFER_SEQUENCE, TRANSFER_KV
from common.transfer.interface import LINK_ERRORS
from common.work_reports import WorkReports
from prefill import events
from prefill.engine import chunk_work
from prefill.sequence import ROOM
from prefill.speed import PrefillSpeed
from prefill.state import PrefillState
from scheduler.policy.pass_times import PassTimes

log = logging.getLogger("lamella.prefill")


@dataclass(slots=True)
class PrefillService:
    """``spawn`` starts a task in the process's task group; ``on_change`` asks for a load report;
    ``keep_here`` gives a sequence that is to be decoded here to the decode room, at once. ``passes``: what
    the instance learns of the engine's; ``reports``: where it tells of what is done. ``links``: what carries
    its KV; a transfer of over ``suspect_after_s`` makes one suspect."""

    state: PrefillState
    engine: SharedEngine
    kv: KVEndpoint
    bus: Bus
    subjects: Subjects
    metrics: InstanceMetrics
    call_timeout_s: float
    spawn: Callable[[Coroutine[None, None, None]], None]
    on_change: Callable[[], None]
    keep_here: Callable[[events.KeepHere], None]
    passes: PassTimes
    reports: WorkReports
    links: LinkWatch
    speed: PrefillSpeed = field(init=False)
    _pulls: dict[tuple[BlockOwner, int], asyncio.Future[KVDelivered]] = field(default_factory=dict)
    _room_spans: RoomSpans = field(default_factory=lambda: RoomSpans(ROOM))
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.speed = PrefillSpeed(self.state.chunk_tokens, self.passes)

    async def prefill(self, task: PrefillTask) -> Acknowledged:
        """Takes a prompt over. Raises Overloaded, NoInstanceReady, RequestCancelled."""
        self._handle(events.TaskArrived(task))
        self._room_spans.begin(task.request, asyncio.get_running_loop().time())
        return Acknowledged()

    async def pull(self, pull: PullKV) -> KVDelivered:
        """Writes a portion of a sequence's KV where the decode instance wants it; answers when no byte is in
        the air.

        Asking again for the same portion joins. Raises UnknownRequest, RequestCancelled, HandoverFailed,
        InvalidRequest, InstanceLost.
        """
        if pull.layout != self.kv.layout:
            raise InvalidRequest(
                f"KV lies as {self.kv.layout} here and as {pull.layout} there", param="layout"
            )
        key = (BlockOwner(ROOM, pull.request_id, pull.attempt), pull.portion)
        future = self._pulls.get(key)
        if future is None:
            future = self._pulls[key] = asyncio.get_running_loop().create_future()
            try:
                self._handle(events.PullArrived(pull))
            except RequestError:
                del self._pulls[key]
                raise
        return await asyncio.shield(future)

    def take_event(self, message: InstanceEvent) -> None:
        """What is told to everyone, or to this instance."""
        match message:
            case CancelRequest():
                self._handle(events.CancelArrived(message.request_id, message.attempt))
            case OfferDeclined():
                owner = BlockOwner(ROOM, message.request_id, message.attempt)
                self._handle(events.OfferDeclined(owner, message.decode_instance, message.wanted))
            case InstanceGone():
                self._handle(events.DecodeInstanceGone(message.instance_id, message.incarnation))
            case GatewayGone():
                self._handle(events.GatewayGone(message.gateway_id))

    def take_over(self, left: events.SequenceLeft) -> None:
        """Hands a sequence over that has left this instance's decode room."""
        self._handle(left)

    def note_freed(self) -> None:
        """The instance's other room has freed blocks."""
        if self.state.pending_requests:
            self._handle(events.BlocksFreed())

    def choose_work(self) -> None:
        """The engine asks for it."""
        self._handle(events.PassDue())

    def note_time(self) -> None:
        """Called with every load report."""
        if self.state.mates.stuck_since_s is not None:
            self._handle(events.TimePassed())

    def change_role(self, *, is_prefill: bool) -> None:
        """Admits prompts from now on, or only finishes those that are here."""
        self._handle(events.RoleChanged(is_prefill))

    async def drain(self, timeout_s: float) -> None:
        """Admits nothing more and returns when nothing is left, at the latest after ``timeout_s``."""
        self._handle(events.DrainStarted())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            self._handle(events.DrainExpired())

    # commands

    def _handle(self, event: events.PrefillEvent) -> None:
        began_ns = timeline.begin()
        commands = self.state.handle(event, asyncio.get_running_loop().time())
        for command in commands:
            self._execute(command)
        timeline.end(began_ns, DECIDE, len(commands))
        self._room_spans.end_departed(self.state.sequences, asyncio.get_running_loop().time())
        if self.state.is_idle:
            self._idle.set()
        else:
            self._idle.clear()
        self.on_change()

    def _execute(self, command: events.PrefillCommand) -> None:
        match command:
            case events.RunChunk(slices, report_every):
                self._run_chunk(slices, report_every)
            case events.PublishToken(gateway_id, token_event, queue_s, compute_s):
                self._publish(gateway_id, TokenBatch(self.state.instance_id, (token_event,)))
                self.metrics.observe_prefill(queue_s, compute_s)
                self._end_span(token_event, queue_s)
            case PublishFailure(gateway_id, failure):
                self._publish(gateway_id, failure)
            case events.PublishMove(gateway_id, moved):
                self._publish(gateway_id, moved)
            case events.SeekDecode():
                self.spawn(self._seek_decode(command))
            case events.OfferSequence():
                self.spawn(self._offer(command))
            case events.KeepHere(held_by, task):
                task = msgspec.structs.replace(task, prompt_time=self._prompt_time)
                self.keep_here(events.KeepHere(held_by, task))
            case events.WithdrawOffer(owner, decode_instance):
                self._withdraw(owner, decode_instance)
            case events.HandOverBegun(queue_s):
                self.metrics.observe_handover_queue(queue_s)
            case events.SendKV():
                self.spawn(self._send(command))
            case events.AnswerPull(owner, portion, answer):
                self._answer(self._pulls.pop((owner, portion)), answer)

    def _end_span(self, event: TokenEvent, queue_s: float) -> None:
        """Token 0 is drawn: what is left is the hand-over."""
        self._room_spans.note_tokens((event,))
        owner = BlockOwner(ROOM, event.request_id, event.attempt)
        now = asyncio.get_running_loop().time()
        self._room_spans.end(owner, now, {"lamella.queue_s": queue_s})

    def _run_chunk(self, slices: tuple[events.ChunkSlice, ...], report_every: int | None) -> None:
        loop = asyncio.get_running_loop()

        def tell(layers: int) -> None:
            loop.call_soon_threadsafe(self._handle, events.LayersComputed(layers))

        reports = None if report_every is None else LayerReports(report_every, tell)
        computing = self.engine.submit("prefill", chunk_work(slices, reports))
        self.spawn(self._take_chunk(slices, computing))

    async def _take_chunk(
        self, slices: tuple[events.ChunkSlice, ...], computing: "asyncio.Future[Computed]"
    ) -> None:
        try:
            computed = await computing
        except Exception:
            requests = [piece.request.request_id for piece in slices]
            log.exception("chunk_failed", extra={"requests": requests})
            self._handle(events.ChunkFailed(ErrorReply(InternalError.code, "the prefill chunk failed")))
            return
        self.speed.observe(slices, computed.elapsed_s, is_alone=computed.is_alone)
        self.metrics.observe_chunk(sum(piece.tokens for piece in slices), computed.elapsed_s)
        # Before the token that the chunk may end with.
        self.reports.tell(_work_of(slices, computed.elapsed_s))
        self._handle(events.ChunkFinished(computed.tokens))

    @property
    def _prompt_time(self) -> PromptTime | None:
        fitted = self.speed.chunk_time
        return None if fitted is None else PromptTime(fitted, self.state.chunk_tokens)

    async def _offer(self, command: events.OfferSequence) -> None:
        subject = self.subjects.instance_calls(command.decode_instance)
        began_ns, owner = timeline.begin(), command.owner
        try:
            task = msgspec.structs.replace(command.task, prompt_time=self._prompt_time)
            await self.bus.call(subject, task, Acknowledged, self.call_timeout_s)
        except (RequestError, BusError) as exc:
            log.warning("offer_refused", extra={"request": command.owner.request_id, "error": str(exc)})
            is_lost = isinstance(exc, BusError)
            error = _as_handover_error(exc, "the decode instance")
            self._handle(events.OfferRefused(command.owner, error, is_lost, command.task.is_early))
        timeline.end(
            began_ns, OFFER_SEQUENCE, owner.attempt, requests=owner.request_id, peer=command.decode_instance
        )

    async def _seek_decode(self, command: events.SeekDecode) -> None:
        """Asks the scheduler once: it knows who is ready, and the gateway tries again where nobody is."""
        owner, life = command.owner, InstanceLife(self.state.instance_id, self.state.incarnation)
        call = PlaceMoved(command.request, life, command.wanted, command.refused)
        try:
            placement = await self.bus.call(self.subjects.submit(), call, Placement, self.call_timeout_s)
        except (RequestError, BusError) as exc:
            log.warning("decode_not_found", extra={"request": owner.request_id, "error": str(exc)})
            self._handle(events.DecodeNotFound(owner, _as_handover_error(exc, "the scheduler")))
        else:
            self._handle(events.DecodeFound(owner, placement))

    def _withdraw(self, owner: BlockOwner, decode_instance: InstanceId) -> None:
        withdrawn = OfferWithdrawn(
            owner.request_id, owner.attempt, self.state.instance_id, self.state.incarnation
        )
        publish_surely(self.bus, self.subjects.instance_events(decode_instance), withdrawn, self.spawn)

    async def _send(self, command: events.SendKV) -> None:
        loop = asyncio.get_running_loop()
        owner = command.owner
        began_ns, started_s = timeline.begin(), loop.time()
        sequence = self.state.sequences.get(owner)
        traceparent = None if sequence is None else sequence.request.traceparent
        ends = (self.state.instance_id, command.pull.decode_instance)
        suspecting = loop.call_later(self.links.suspect_after_s, self.links.note_failed, *ends)
        try:
            nbytes = await self.kv.send(command.pull, command.source_blocks, command.spans)
        except (TransferError, ValueError) as exc:
            log.warning("kv_send_failed", extra={"request": owner.request_id, "error": str(exc)})
            self.metrics.transfer_failed()
            code = KVLinkBroken.code if isinstance(exc, LINK_ERRORS) else HandoverFailed.code
            self._handle(events.SendFailed(owner, ErrorReply(code, str(exc))))
            return
        finally:
            suspecting.cancel()
        self.links.note_worked(*ends)
        elapsed_s = loop.time() - started_s
        self.metrics.observe_transfer(nbytes, elapsed_s)
        facts: Attributes = {
            "lamella.request.id": owner.request_id,
            "lamella.attempt": owner.attempt,
            "lamella.portion": command.pull.portion,
            "lamella.transfer.bytes": nbytes,
            "lamella.transfer.to": command.pull.decode_instance,
        }
        spans.record("kv.transfer", traceparent, started_s, facts, loop.time())
        self.reports.note_sent(command.pull.decode_instance, nbytes)
        first, last = command.spans[0], command.spans[-1]
        timeline.end(
            began_ns,
            TRANSFER_KV,
            owner.attempt,
            nbytes,
            first.layers.start,
            last.layers.stop - 1,
            requests=owner.request_id,
            peer=command.pull.decode_instance,
        )
        self._handle(events.SendFinished(owner, nbytes, elapsed_s))

    def _answer(self, asked: "asyncio.Future[KVDelivered]", answer: KVDelivered | ErrorReply) -> None:
        if isinstance(answer, KVDelivered):
            asked.set_result(answer)
        else:
            asked.set_exception(as_request_error(answer))
            asked.exception()

    def _publish(self, gateway_id: GatewayId, event: GatewayEvent) -> None:
        publish_surely(self.bus, self.subjects.gateway_events(gateway_id), event, self.spawn)


def _work_of(slices: tuple[events.ChunkSlice, ...], elapsed_s: float) -> Iterator[tuple[GatewayId, Work]]:
    for piece in slices:
        owner = piece.owner
        work = Work(owner.request_id, owner.attempt, "prefill", elapsed_s, tokens=piece.tokens)
        yield piece.request.gateway_id, work


def _as_handover_error(exc: RequestError | BusError, asked: str) -> ErrorReply:
    if isinstance(exc, RequestError):
        return error_reply(exc)
    return ErrorReply(HandoverFailed.code, f"{asked} did not answer: {exc}")
