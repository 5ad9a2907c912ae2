"""What ``gateway.journal`` and ``gateway.attempts`` do, in virtual time: submit, collect, continue, end."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.errors import BusError, RequestError
from common.ids import Incarnation, InstanceId, RequestId
from common.messages import (
    CancelRequest,
    FinishReason,
    GatewayGone,
    GenerationRequest,
    InstanceGone,
    InstanceLife,
    Placement,
    Queued,
    RequestEnded,
    SchedulerGone,
    SequenceFailed,
    SequenceMoved,
    SubmitRequest,
    TokenBatch,
    TokenEvent,
)
from gateway.continuing import FOR_LATER, chosen_since_s
from gateway.losses import DECLARED_WITHIN_S, Losses
from tests.requests import GATEWAY
from tests.virtual.bus import Bus, Reply
from tests.virtual.scheduler import SCHEDULER
from tests.virtual.shape import LEASE_S

SUBMIT_TIMEOUT_S = 60.0
RETRY_S = 0.2


@dataclass(slots=True)
class Entry:
    """``end`` is how it ended, once it has."""

    request: GenerationRequest
    output_ids: list[int] = field(default_factory=list)
    placement: Placement | None = None
    asked_s: float = 0.0
    moved: Placement | None = None
    lost_instances: tuple[InstanceId, ...] = ()
    former: InstanceLife | None = None
    attempt_tokens: int = 0
    end: FinishReason | RequestError | str | None = None
    is_submitting: bool = False


@dataclass(slots=True)
class VirtualGateway:
    bus: Bus
    entries: dict[RequestId, Entry] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    _gone_s: dict[InstanceGone, float] = field(default_factory=dict)
    _schedulers_gone: set[Incarnation] = field(default_factory=set)
    _losses: Losses = field(default_factory=lambda: Losses(LEASE_S))

    @property
    def is_done(self) -> bool:
        return all(entry.end is not None and not entry.is_submitting for entry in self.entries.values())

    def start(self, request: GenerationRequest) -> None:
        entry = Entry(request)
        self.entries[request.request_id] = entry
        self._submit(entry)

    def leave(self, request_id: RequestId) -> None:
        """The client goes away."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.end is None:
            self._end(entry, "left")

    def hear(self, message: msgspec.Struct) -> None:
        match message:
            case TokenBatch():
                for event in message.tokens:
                    self._take(message.instance_id, event)
            case SequenceFailed():
                entry = self.entries[message.request_id]
                if message.attempt != entry.request.attempt or entry.end is not None:
                    return
                assert message.can_continue, message
                entry.former = None
                if message.lost_instance is not None:
                    entry.lost_instances = (*entry.lost_instances, message.lost_instance)
                self._continue(entry, message.error.message)
            case SequenceMoved():
                self._move(message)
            case SchedulerGone() if message.incarnation not in self._schedulers_gone:
                self._schedulers_gone.add(message.incarnation)
                for entry in self.entries.values():
                    if entry.end is None and entry.placement is None and entry.is_submitting:
                        self._continue(entry, "scheduler gone")
            case InstanceGone():
                self._gone_s[message] = self.bus.clock.now
                for entry in self.entries.values():
                    if entry.end is None and self._needs(entry, message):
                        self._continue_without(entry, message)
            case GatewayGone():
                self._losses.declared_gone_s = self.bus.clock.now
                for entry in self.entries.values():
                    if entry.end is None and entry.placement is not None:
                        self._continue(entry, "declared gone")
                self.bus.clock.after(DECLARED_WITHIN_S, self._continue_those_begun_since)

    def _continue_those_begun_since(self) -> None:
        for entry in self.entries.values():
            is_placed = entry.end is None and entry.placement is not None
            if is_placed and self._losses.is_forgotten(entry.asked_s, self.bus.clock.now):
                self._continue(entry, "declared gone")

    def _move(self, message: SequenceMoved) -> None:
        entry, to = self.entries[message.request_id], message.placement
        if message.attempt != entry.request.attempt or entry.end is not None:
            cancel = CancelRequest(message.request_id, message.attempt)
            self.bus.publish(GATEWAY, to.decode_instance, cancel)
            return
        entry.moved = to
        if entry.placement is not None:
            entry.placement = to
            self._continue_if_gone(entry, chosen_since_s(entry.asked_s, self.bus.clock.now))

    def serve(self, message: msgspec.Struct, reply: Callable[[Reply], None]) -> None:
        raise AssertionError("nobody calls a gateway")

    def _take(self, instance_id: InstanceId, event: TokenEvent) -> None:
        entry = self.entries[event.request_id]
        assert event.attempt <= entry.request.attempt, "a token of an attempt that was never made"
        if event.attempt < entry.request.attempt or entry.end == "left":
            if event.finish_reason is None:
                cancel = CancelRequest(event.request_id, event.attempt)
                self.bus.publish(GATEWAY, instance_id, cancel)
            return
        if event.index < len(entry.output_ids):
            # A call that was answered too late was made again: the same attempt is computed twice.
            assert entry.output_ids[event.index] == event.token.token_id, f"{event} was another before"
            return
        assert entry.end is None, f"a token after the end of {event.request_id}"
        assert event.index == len(entry.output_ids), f"{event} after {len(entry.output_ids)} tokens"
        entry.output_ids.append(event.token.token_id)
        entry.attempt_tokens += 1
        if event.finish_reason is not None:
            self._end(entry, event.finish_reason)

    def _submit(self, entry: Entry) -> None:
        entry.is_submitting = True
        started_s = self.bus.clock.now
        request = entry.request

        def answer(reply: Reply) -> None:
            is_current = entry.request is request
            # Told once: told again with every retry, it would keep an instance that came back suspect.
            entry.lost_instances = entry.lost_instances[len(told) :]
            entry.is_submitting = entry.is_submitting and not is_current
            if isinstance(reply, Queued) and is_current and entry.end is None:
                entry.is_submitting = True
                self._ask(request, (), None, answer)
            elif isinstance(reply, Placement):
                self._settle(entry, request, reply, started_s)
            elif entry.end is not None:
                self._tell_ended(entry)
            elif is_current and isinstance(reply, BusError):
                ended = RequestEnded(request.request_id, attempt=request.attempt)
                self.bus.publish(GATEWAY, SCHEDULER, ended)
                self.bus.clock.after(RETRY_S, lambda: self._submit_again(entry, request))
            elif is_current and isinstance(reply, FOR_LATER):
                self.bus.clock.after(RETRY_S, lambda: self._submit_again(entry, request))
            elif is_current:
                raise AssertionError(f"{request.request_id} was refused: {reply!r}")

        told = entry.lost_instances
        self._ask(request, told, entry.former, answer)

    def _ask(
        self,
        request: GenerationRequest,
        told: tuple[InstanceId, ...],
        former: InstanceLife | None,
        answer: Callable[[Reply], None],
    ) -> None:
        self.bus.call(GATEWAY, SCHEDULER, SubmitRequest(request, told, former), answer, SUBMIT_TIMEOUT_S)

    def _submit_again(self, entry: Entry, request: GenerationRequest) -> None:
        if entry.end is None and entry.request is request:
            entry.request = msgspec.structs.replace(request, attempt=request.attempt + 1)
            self._submit(entry)

    def _settle(
        self, entry: Entry, request: GenerationRequest, placement: Placement, started_s: float
    ) -> None:
        if entry.request is not request:
            self._cancel(request, placement)
            return
        entry.placement = entry.moved or placement
        entry.asked_s = started_s
        entry.former = None
        if entry.end is not None:
            self._tell_ended(entry)
        elif self._losses.is_forgotten(started_s, self.bus.clock.now):
            self._continue(entry, "declared gone")
        else:
            self._continue_if_gone(entry, started_s)

    def _continue_if_gone(self, entry: Entry, since_s: float) -> None:
        for gone, gone_s in self._gone_s.items():
            if gone_s >= since_s and self._needs(entry, gone):
                self._continue_without(entry, gone)
                return

    def _needs(self, entry: Entry, gone: InstanceGone) -> bool:
        placement = entry.placement
        if placement is None:
            return False
        prefill = InstanceGone(placement.prefill_instance, placement.prefill_incarnation)
        decode = InstanceGone(placement.decode_instance, placement.decode_incarnation)
        return gone == decode or (entry.attempt_tokens < 2 and gone == prefill)

    def _continue_without(self, entry: Entry, gone: InstanceGone) -> None:
        placement = entry.placement
        assert placement is not None
        is_resumed = placement.prefill_instance == placement.decode_instance
        has_decoded = entry.attempt_tokens >= (1 if is_resumed else 2)
        if has_decoded and gone.instance_id == placement.decode_instance:
            entry.former = InstanceLife(gone.instance_id, gone.incarnation)
        self._continue(entry, "gone")

    def _continue(self, entry: Entry, cause: str) -> None:
        self.causes.append(cause)
        if entry.placement is not None:
            self._cancel(entry.request, entry.placement)
        entry.placement = entry.moved = None
        entry.attempt_tokens = 0
        entry.request = msgspec.structs.replace(
            entry.request, output_ids=tuple(entry.output_ids), attempt=entry.request.attempt + 1
        )
        self._submit(entry)

    def _end(self, entry: Entry, end: FinishReason | str) -> None:
        entry.end = end
        if not entry.is_submitting:
            self._tell_ended(entry)

    def _tell_ended(self, entry: Entry) -> None:
        if entry.placement is not None:
            self._cancel(entry.request, entry.placement)
        self.bus.publish(
            GATEWAY, SCHEDULER, RequestEnded(entry.request.request_id, attempt=entry.request.attempt)
        )

    def _cancel(self, request: GenerationRequest, placement: Placement) -> None:
        for instance_id in (placement.prefill_instance, placement.decode_instance):
            cancel = CancelRequest(request.request_id, request.attempt)
            self.bus.publish(GATEWAY, instance_id, cancel)
