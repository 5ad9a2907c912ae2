"""Every open choice of this gateway, and the way its tokens find it.

A choice ends here whatever happens: finished, stopped, failed or left by its client; then everybody is told.
An attempt that broke (preempted, hand-over failed, instance drained or dead, a token missing) is placed anew
with the tokens that came so far, at most ``max_continuations`` times in a row without getting on.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import NamedTuple

from common.bus import Bus
from common.config import Config
from common.errors import (
    BusError,
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NoInstanceReady,
    Overloaded,
    RequestCancelled,
    RequestError,
)
from common.ids import GatewayId, Incarnation, InstanceId, RequestId
from common.latency import ServiceObjectives, ttft_s
from common.messages import (
    Announcement,
    CancelRequest,
    GatewayEvent,
    GatewayGone,
    GenerationRequest,
    InstanceGone,
    InstanceLife,
    Placement,
    RequestEnded,
    SchedulerGone,
    SequenceFailed,
    SequenceMoved,
    SubmitAnswer,
    SubmitRequest,
    TokenBatch,
    TokenEvent,
    as_request_error,
)
from common.service_classes import objectives_of, service_classes_of
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import (
    CONTINUED,
    FINISHED,
    FIRST_TOKEN,
    OPEN_REQUESTS,
    PLACE_REQUEST,
    PLACED,
    RECEIVED,
    SECOND_TOKEN,
    TAKE_TOKENS,
)
from gateway.errors import from_bus
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.service_levels import Ended, ServiceLevels

log = logging.getLogger("lamella.gateway")

CONTINUE_DEADLINE_S = 30.0
"""How long a broken sequence waits for an instance that can take it over."""
LOSS_SETTLES_S = 1.0
CONTINUE_BACKOFF_S = 0.2
"""Before it asks again, where nobody could take it over; twice as long each time that who took it had no room
after all: what the scheduler knows is a moment old."""
GONE_MEMORY_S = 60.0
"""Longer than any submission takes."""
MOVED_WITHIN_S = 10.0
"""Longer than it takes from the choice of a sequence's new home until the gateway hears of it."""
DECLARED_GONE = "declared_gone"
"""Instances forgot this gateway's sequences because the scheduler missed its lease."""


class Submission(NamedTuple):
    """``answered`` is what is waited for: the task's end, or that another submission has taken its place."""

    task: asyncio.Task[None]
    answered: asyncio.Future[None]


@dataclass(slots=True)
class Journal:
    """``spawn`` starts a task in the process's task group.

    ``_gone_s``: when incarnations left, for placements that were made before and are told after;
    ``schedulers_gone_s``: when schedulers fell silent; ``_declared_gone_s``: when this gateway was said to
    have left, though it lives.
    """

    gateway_id: GatewayId
    config: Config
    bus: Bus
    subjects: Subjects
    metrics: GatewayMetrics
    spawn: Callable[[Coroutine[None, None, None]], None]
    open: dict[RequestId, Generation] = field(default_factory=dict)
    schedulers_gone_s: dict[Incarnation, float] = field(default_factory=dict)
    levels: ServiceLevels = field(init=False)
    _objectives: dict[str, ServiceObjectives] = field(init=False)
    _submitting: dict[RequestId, Submission] = field(default_factory=dict)
    _gone_s: dict[InstanceGone, float] = field(default_factory=dict)
    _declared_gone_s: float = -math.inf
    _empty: asyncio.Event = field(default_factory=asyncio.Event)
    _continuing: asyncio.TimerHandle | None = None
    _stranded: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        classes = service_classes_of(self.config)
        self._objectives = {name: objectives_of(each) for name, each in classes.items()}
        self.levels = ServiceLevels(self._objectives, time.monotonic())

    # what the HTTP side asks for

    async def start(self, generation: Generation) -> None:
        """Opens the entry and places it. Raises the refusal; the entry is then closed again."""
        self.open[generation.request.request_id] = generation
        timeline.mark(RECEIVED, generation.request.request_id)
        self._note_size()
        attempt = generation.request.attempt
        try:
            await self._submit(generation)
        except RequestError as exc:
            if generation.request.attempt != attempt:
                return
            if generation.is_queued and isinstance(exc, NoInstanceReady):
                # It waited at a scheduler that is gone: another one is asked, as for a stream that broke.
                generation.next_attempt()
                await self._place_again(generation, CONTINUE_BACKOFF_S)
                return
            self._close(generation, is_refused=True)
            raise

    def end(self, generation: Generation) -> None:
        """Closes the entry and tells whoever still works for it. Safe to call twice."""
        request_id = generation.request.request_id
        if request_id not in self.open:
            return
        self._close(generation)
        submitting = self._submitting.get(request_id)
        if submitting is None:
            self._tell_ended(generation)
        else:
            if generation.is_queued:
                self._publish_ended(generation)
            # Word of its end that overtakes the submission would find nothing to end.
            submitting.task.add_done_callback(lambda _: self._tell_ended(generation))

    async def wait_empty(self) -> None:
        self._note_size()
        await self._empty.wait()

    # what the bus brings

    def take(self, message: GatewayEvent | Announcement) -> None:
        match message:
            case TokenBatch():
                self._take_tokens(message)
            case SequenceFailed():
                self._take_failure(message)
            case SequenceMoved():
                self._take_move(message)
            case InstanceGone():
                self._continue_those_on(message)
            case SchedulerGone():
                self._submit_again(message)
            case GatewayGone():
                if message.gateway_id == self.gateway_id:
                    self._declared_gone_s = time.monotonic()
                    self._continue_placed(DECLARED_GONE)

    def continue_all(self) -> None:
        """The bus was away: tokens may be lost without a later one that shows the gap."""
        self._continue_placed("bus_reconnect")

    def _continue_placed(self, cause: str) -> None:
        for generation in list(self.open.values()):
            if generation.placement is not None and not generation.is_over:
                self._continue(generation, cause)

    def note_loss(self) -> None:
        """Messages to this gateway were dropped, most likely more are about to be: all continue, once."""
        if self._continuing is None:
            self._continuing = asyncio.get_running_loop().call_later(
                LOSS_SETTLES_S, self._continue_after_loss
            )

    def _continue_after_loss(self) -> None:
        self._continuing = None
        self.continue_all()

    def note_disconnect(self) -> None:
        """No token comes until the bus is back. Streams wait for that, but not for ever."""
        if self._stranded is None:
            self._stranded = asyncio.get_running_loop().call_later(
                self.config.gateway.bus_timeout_s, self._fail_stranded
            )

    def note_reconnect(self) -> None:
        """Whatever was published meanwhile is lost: all continue."""
        if self._stranded is not None:
            self._stranded.cancel()
            self._stranded = None
        self.continue_all()

    def _fail_stranded(self) -> None:
        self._stranded = None
        waited_s = self.config.gateway.bus_timeout_s
        for generation in list(self.open.values()):
            generation.fail(NoInstanceReady(f"the mesh has not answered for {waited_s:g} s"))

    def fail_all(self) -> None:
        """The time to drain is over: open streams end with an error their clients can act on."""
        for generation in list(self.open.values()):
            generation.fail(NoInstanceReady("this gateway is shutting down"))

    def _take_tokens(self, batch: TokenBatch) -> None:
        began_ns = timeline.begin()
        now = time.monotonic()
        taken = 0
        for event in batch.tokens:
            generation = self.open.get(event.request_id)
            if generation is None or event.attempt < generation.request.attempt:
                # An instance that works for a forgotten attempt: told once per token until it hears.
                if event.finish_reason is None:
                    self._publish_cancel(batch.instance_id, event.request_id, event.attempt)
                continue
            try:
                taken += self._take_token(generation, event, now)
            except Exception:
                # One sequence's defect must not cost the others their tokens.
                log.exception("token_failed", extra={"request": event.request_id})
                generation.fail(InternalError("internal error"))
        self.metrics.generation_tokens.inc(taken)
        if began_ns:
            ids = " ".join(event.request_id for event in batch.tokens)
            timeline.end(began_ns, TAKE_TOKENS, taken, requests=ids, peer=batch.instance_id)

    def _take_token(self, generation: Generation, event: TokenEvent, now: float) -> bool:
        verdict = generation.take(event)
        if verdict == "taken":
            self._observe(generation, now)
            if generation.is_over:
                self._take_end(generation, event)
            generation.notify(generation)
            return True
        if verdict == "gap":
            self.metrics.stream_gaps.inc()
            self._continue(generation, "gap")
        return False

    def _take_end(self, generation: Generation, last: TokenEvent) -> None:
        """The sequence is over, though its client may not have everything yet."""
        if generation.placement is None:
            # It came before the answer to its submission; ``_settle`` tells.
            return
        if last.finish_reason is None:
            # A stop string: only the gateway knows of it.
            self._cancel_attempt(generation)
        self._tell_scheduler(generation)

    def _observe(self, generation: Generation, now: float) -> None:
        if generation.first_token_s is None:
            timeline.mark(FIRST_TOKEN, generation.request.request_id)
            generation.first_token_s = now
            self.metrics.ttft.observe(ttft_s(generation.arrived_s, now), generation.request.service_class)
        elif generation.last_token_s is not None:
            self.metrics.tbt.observe(now - generation.last_token_s)
            if len(generation.output_ids) == 2:
                timeline.mark(SECOND_TOKEN, generation.request.request_id)
        generation.last_token_s = now
        if generation.is_over and generation.tpot_s is not None:
            self.metrics.tpot.observe(generation.tpot_s, generation.request.service_class)

    def _take_failure(self, message: SequenceFailed) -> None:
        generation = self.open.get(message.request_id)
        if generation is None or message.attempt != generation.request.attempt or generation.is_over:
            return
        if message.can_continue:
            # The attempt that was to go on with its KV, if it was one, has failed.
            generation.former = None
            if message.lost_instance is not None:
                generation.lost_instances = (*generation.lost_instances, message.lost_instance)
            is_refusal = message.error.code in (Overloaded.code, NoInstanceReady.code)
            backoff_s = CONTINUE_BACKOFF_S * 2**generation.continuations if is_refusal else 0.0
            self._continue(generation, message.error.code, backoff_s)
        else:
            generation.fail(as_request_error(message.error))

    def _take_move(self, message: SequenceMoved) -> None:
        generation = self.open.get(message.request_id)
        if generation is None or message.attempt != generation.request.attempt or generation.is_over:
            # What told its former home so may have come too late there.
            decode_instance = message.placement.decode_instance
            self._publish_cancel(decode_instance, message.request_id, message.attempt)
            return
        generation.move(message)
        if generation.placement is not None:
            # One that was declared gone and lives comes back as itself: what is longer ago says nothing.
            self._continue_if_gone(generation, generation.placement, time.monotonic() - MOVED_WITHIN_S)

    def _continue_if_gone(self, generation: Generation, placement: Placement, since_s: float) -> None:
        """Where word that an instance of the placement left came before that of the placement."""
        for gone, gone_s in self._gone_s.items():
            if gone_s >= since_s and _needs(generation, placement, gone):
                self._continue_without(generation, placement, gone)
                return

    def _continue_those_on(self, gone: InstanceGone) -> None:
        now = time.monotonic()
        kept = {each: gone_s for each, gone_s in self._gone_s.items() if now - gone_s < GONE_MEMORY_S}
        self._gone_s = {**kept, gone: now}
        for generation in list(self.open.values()):
            placement = generation.placement
            if placement is None or generation.is_over:
                continue
            if _needs(generation, placement, gone):
                self._continue_without(generation, placement, gone)

    def _continue_without(self, generation: Generation, placement: Placement, gone: InstanceGone) -> None:
        if _has_decoded(generation, placement) and gone == _decode_life(placement):
            generation.former = InstanceLife(gone.instance_id, gone.incarnation)
        self._continue(generation, InstanceLost.code)

    # placing

    async def _submit(self, generation: Generation) -> None:
        """Submits the current attempt. Raises the refusal.

        Kept going when the client leaves: only its end tells where there is something to cancel.
        """
        request_id = generation.request.request_id
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._place(generation, generation.request))
        submission = self._submitting[request_id] = Submission(task, answered)
        task.add_done_callback(lambda _: self._end_submission(request_id, submission))
        await answered

    def _end_submission(self, request_id: RequestId, submission: Submission) -> None:
        if self._submitting.get(request_id) is submission:
            del self._submitting[request_id]
        task, answered = submission
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if answered.done():
            return
        if error is None:
            answered.set_result(None)
        else:
            answered.set_exception(error)

    def _submit_again(self, gone: SchedulerGone) -> None:
        """What has no answer yet may have been that scheduler's: the next attempt is anybody's. Each of the
        others says that it is gone; a lease later it is another silence."""
        now, lease_s = time.monotonic(), self.config.mesh.lease_s
        known_s = self.schedulers_gone_s
        self.schedulers_gone_s = {each: gone_s for each, gone_s in known_s.items() if now - gone_s < lease_s}
        if gone.incarnation in self.schedulers_gone_s:
            return
        self.schedulers_gone_s[gone.incarnation] = now
        for request_id, submission in list(self._submitting.items()):
            generation = self.open.get(request_id)
            if generation is not None and generation.placement is None and not generation.is_over:
                self._continue(generation, "scheduler_gone")
                if not submission.answered.done():
                    submission.answered.set_result(None)

    async def _place(self, generation: Generation, request: GenerationRequest) -> None:
        started_s = time.monotonic()
        began_ns = timeline.begin()
        mesh, attempts = self.config.mesh, self.config.scheduler.dispatch_attempts
        # One call for each, and one to the instance that may go on with the KV that is kept.
        timeout_s = mesh.call_timeout_s * (attempts + 1 + (generation.former is not None))
        # Told once: an instance that has begun anew since, and is heard of, is not to be suspected again.
        lost, generation.lost_instances = generation.lost_instances, ()
        try:
            message = SubmitRequest(request, lost, generation.former)
            placement = await self._ask_placement(generation, message, timeout_s)
        except MessageTooLarge as exc:
            raise InvalidRequest(f"the prompt does not fit a message: {exc}", param="prompt") from exc
        except BusError as exc:
            generation.lost_instances = lost + generation.lost_instances
            # It may have been placed nevertheless; its tokens would be answered with a cancellation.
            ended = RequestEnded(request.request_id, attempt=request.attempt)
            self._publish(self.subjects.scheduler_events(), ended)
            raise from_bus(exc) from exc
        timeline.end(began_ns, PLACE_REQUEST, request.attempt, requests=request.request_id)
        timeline.mark(PLACED, request.request_id)
        self._settle(generation, request, placement, started_s)

    async def _ask_placement(
        self, generation: Generation, message: SubmitRequest, timeout_s: float
    ) -> Placement:
        """As often as its scheduler says that it still waits. Raises BusError, the refusal, RequestCancelled
        once nobody waits for it, and DeadlineExceeded."""
        request = message.request
        while True:
            answer = await self.bus.call(self.subjects.submit(), message, SubmitAnswer, timeout_s)
            if isinstance(answer, Placement):
                return answer
            if generation.request.attempt != request.attempt or request.request_id not in self.open:
                raise RequestCancelled("nobody waits for it any more")
            generation.is_queued = True
            if time.monotonic() - generation.arrived_s > self.config.gateway.token_timeout_s:
                raise DeadlineExceeded("no instance had room within gateway.token_timeout_s")
            message = SubmitRequest(request)

    def _settle(
        self, generation: Generation, request: GenerationRequest, placement: Placement, started_s: float
    ) -> None:
        """Keeps the placement of the current attempt; one that nobody wants any more is cancelled there."""
        if generation.request.attempt != request.attempt:
            self._cancel(request, placement)
            return
        placement = generation.place(placement)
        generation.former = None
        if generation.is_over:
            # Its stop string overtook this placement.
            self._tell_ended(generation)
            return
        if request.request_id not in self.open:
            return
        if self._declared_gone_s >= started_s:
            self._continue(generation, DECLARED_GONE)
            return
        self._continue_if_gone(generation, placement, started_s)

    def _continue(self, generation: Generation, cause: str, backoff_s: float = 0.0) -> None:
        if generation.continuations >= self.config.gateway.max_continuations:
            generation.fail(InstanceLost(f"the sequence broke {generation.continuations + 1} times: {cause}"))
            return
        log.warning("sequence_continued", extra={"request": generation.request.request_id, "cause": cause})
        self.metrics.continuations.labels(cause).inc()
        self._cancel_attempt(generation)
        timeline.mark(CONTINUED, generation.request.request_id, generation.request.attempt)
        generation.continue_elsewhere()
        self.spawn(self._place_again(generation, backoff_s))

    async def _place_again(self, generation: Generation, backoff_s: float) -> None:
        """Until it is placed, refused for good, or superseded by yet another attempt."""
        deadline_s = time.monotonic() + CONTINUE_DEADLINE_S
        attempt = generation.request.attempt
        request_id = generation.request.request_id
        await asyncio.sleep(backoff_s)
        while not generation.is_over and generation.request.attempt == attempt and request_id in self.open:
            try:
                await self._submit(generation)
            except (Overloaded, NoInstanceReady) as exc:
                if generation.request.attempt != attempt:
                    return
                if time.monotonic() > deadline_s:
                    generation.fail(exc)
                    return
                await asyncio.sleep(CONTINUE_BACKOFF_S)
                if not generation.is_over and generation.request.attempt == attempt:
                    attempt = generation.next_attempt().attempt
            except RequestError as exc:
                if generation.request.attempt == attempt:
                    generation.fail(exc)
                return
            else:
                return

    # endings

    def _close(self, generation: Generation, *, is_refused: bool = False) -> None:
        self.open.pop(generation.request.request_id, None)
        self._judge(generation, is_refused)
        timeline.mark(FINISHED, generation.request.request_id)
        self._note_size()

    def _judge(self, generation: Generation, is_refused: bool) -> None:
        """By its class's objectives; whom its client left says nothing about them."""
        now, service_class = time.monotonic(), generation.request.service_class
        is_served = generation.finish_reason is not None and generation.ttft_s is not None
        if not (is_served or generation.error is not None or is_refused):
            return
        latency = generation.latency(now) if is_served else None
        tokens = len(generation.output_ids)
        self.metrics.judge(service_class, self._objectives[service_class], latency, tokens)
        self.levels.add(Ended(now, service_class, latency, tokens))

    def _note_size(self) -> None:
        self.metrics.open_requests.set(len(self.open))
        timeline.count(OPEN_REQUESTS, len(self.open))
        if self.open:
            self._empty.clear()
        else:
            self._empty.set()

    def _tell_ended(self, generation: Generation) -> None:
        if generation.is_told:
            return
        self._cancel_attempt(generation)
        self._tell_scheduler(generation)

    def _tell_scheduler(self, generation: Generation) -> None:
        generation.is_told = True
        self._publish_ended(generation)

    def _publish_ended(self, generation: Generation) -> None:
        request = generation.request
        drawn = None if generation.finish_reason is None else len(generation.output_ids)
        is_cut = generation.finish_reason == "length"
        measured = (None, None) if drawn is None else (generation.ttft_s, generation.tpot_s)
        prompt_tokens, attempt = len(request.prompt_ids), request.attempt
        ended = RequestEnded(request.request_id, prompt_tokens, drawn, is_cut, *measured, attempt)
        self._publish(self.subjects.scheduler_events(), ended)

    def _cancel_attempt(self, generation: Generation) -> None:
        if generation.placement is not None:
            self._cancel(generation.request, generation.placement)

    def _cancel(self, request: GenerationRequest, placement: Placement) -> None:
        for instance_id in {placement.prefill_instance, placement.decode_instance}:
            self._publish_cancel(instance_id, request.request_id, request.attempt)

    def _publish_cancel(self, instance_id: InstanceId, request_id: RequestId, attempt: int) -> None:
        self._publish(self.subjects.instance_events(instance_id), CancelRequest(request_id, attempt))

    def _publish(self, subject: str, message: CancelRequest | RequestEnded) -> None:
        try:
            self.bus.publish(subject, message)
        except BusError as exc:
            log.warning("publish_failed", extra={"subject": subject, "error": str(exc)})


def _needs(generation: Generation, placement: Placement, gone: InstanceGone) -> bool:
    """Once a second token came, decode holds the KV and the prefill instance is not needed any more."""
    prefill = InstanceGone(placement.prefill_instance, placement.prefill_incarnation)
    return gone == _decode_life(placement) or (generation.attempt_tokens < 2 and gone == prefill)


def _decode_life(placement: Placement) -> InstanceGone:
    return InstanceGone(placement.decode_instance, placement.decode_incarnation)


def _has_decoded(generation: Generation, placement: Placement) -> bool:
    """Whether the decode instance drew a token of this attempt; the first is prefill's, if it takes part."""
    is_resumed = placement.prefill_instance == placement.decode_instance
    return generation.attempt_tokens >= (1 if is_resumed else 2)
