"""One attempt after another: where a request goes, and that it goes on elsewhere when that broke.

An attempt that broke (preempted, hand-over failed, instance drained or dead, a token missing) is placed anew
with the tokens that came so far, at most ``max_continuations`` times in a row without getting on. Whose
scheduler died before it said where the attempt goes is only submitted again, which costs none of these.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.errors import (
    InstanceLost,
    InternalError,
    NoInstanceReady,
    RequestCancelled,
    RequestError,
)
from common.ids import RequestId
from common.messages import (
    GenerationRequest,
    InstanceGone,
    Placement,
    SchedulerGone,
    SequenceFailed,
    SequenceMoved,
)
from common.spans import SpanEvent
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import CONTINUED
from gateway.continuing import (
    CONTINUE_BACKOFF_S,
    CONTINUE_DEADLINE_S,
    FOR_LATER,
    backoff_s,
    broken_text,
    chosen_since_s,
    wait_s,
)
from gateway.generation import Generation
from gateway.losses import DECLARED_WITHIN_S, Losses, find_former, is_needed
from gateway.metrics import GatewayMetrics
from gateway.notices import Notices
from gateway.submissions import Submissions

log = logging.getLogger("lamella.gateway")

MAX_RESUBMISSIONS = 3
"""In a row. One that has seen more schedulers die before it was placed may be what they died of."""
DECLARED_GONE = "declared_gone"
"""Instances forgot this gateway's sequences because the scheduler missed its lease."""


@dataclass(slots=True)
class Attempts:
    """``open``: the journal's entries, whose clients wait. ``spawn`` starts a task in the process's task
    group."""

    config: Config
    bus: Bus
    subjects: Subjects
    notices: Notices
    metrics: GatewayMetrics
    open: Mapping[RequestId, Generation]
    spawn: Callable[[Coroutine[None, None, None]], None]
    submissions: Submissions = field(init=False)
    losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        self.submissions = Submissions(
            self.config, self.bus, self.subjects, self.notices, self.open, self._settle
        )
        self.losses = Losses(self.config.mesh.lease_s)

    async def start(self, generation: Generation) -> None:
        """The first one, and those that follow where nobody is there for it. Raises the refusal."""
        began_s, asked = time.monotonic(), 0
        while True:
            attempt = generation.request.attempt
            try:
                await self.submissions.submit(generation)
            except RequestError as exc:
                if not self._is_at(generation, attempt):
                    return
                if self._can_ask_again(generation, exc):
                    generation.next_attempt()
                    await self._place_again(generation, CONTINUE_BACKOFF_S)
                    return
                most_s = self.config.gateway.wait_for_instance_s
                pause_s = wait_s(exc, asked, time.monotonic() - began_s, most_s)
                if pause_s is None:
                    raise
                if asked == 0:
                    facts = {"request": generation.request.request_id, "error": exc.message}
                    log.warning("request_waits", extra=facts)
                asked += 1
                await asyncio.sleep(pause_s)
                if not self._is_at(generation, attempt):
                    return
                generation.next_attempt()
            else:
                return

    def _is_at(self, generation: Generation, attempt: int) -> bool:
        """Whether somebody waits for that attempt of its."""
        is_open = generation.request.request_id in self.open and not generation.is_over
        return is_open and generation.request.attempt == attempt

    def _can_ask_again(self, generation: Generation, refusal: RequestError) -> bool:
        """Of a first attempt, as of a stream that broke: it waited at a scheduler that is gone, or was taken
        for one that has ended, though its client waits: this gateway was said to have left meanwhile."""
        if isinstance(refusal, RequestCancelled):
            return generation.request.request_id in self.open
        return generation.is_queued and isinstance(refusal, NoInstanceReady)

    # why one ends and the next begins

    def take_failure(self, generation: Generation, message: SequenceFailed) -> None:
        """Of one that may continue."""
        # The attempt that was to go on with its KV, if it was one, has failed.
        generation.former = None
        if message.lost_instance is not None:
            generation.lost_instances = (*generation.lost_instances, message.lost_instance)
        code = message.error.code
        self.continue_elsewhere(generation, code, backoff_s(code, generation.continuations))

    def take_move(self, generation: Generation, message: SequenceMoved) -> None:
        generation.move(message)
        if generation.placement is not None:
            # One that was declared gone and lives comes back as itself: what is longer ago says nothing.
            since_s = chosen_since_s(generation.asked_s, time.monotonic())
            self._continue_if_lost(generation, generation.placement, since_s)

    def take_instance_gone(self, gone: InstanceGone) -> None:
        self.losses.note_instance(gone, time.monotonic())
        for generation in list(self.open.values()):
            placement = generation.placement
            if placement is None or generation.is_over:
                continue
            if is_needed(placement, generation.attempt_tokens, gone):
                self._continue_without(generation, placement, gone)

    def take_scheduler_gone(self, gone: SchedulerGone) -> None:
        """What has no answer yet may have been that scheduler's: the next attempt is anybody's."""
        if self.losses.note_scheduler(gone.incarnation, time.monotonic()):
            self.submissions.take_over(self._submit_again)

    def take_declared_gone(self) -> None:
        """This gateway is said to have left, though it lives."""
        self.losses.declared_gone_s = time.monotonic()
        for generation in self._placed():
            self._continue_forgotten(generation)
        self.spawn(self._continue_those_begun_since(self.losses.declared_gone_s + DECLARED_WITHIN_S))

    async def _continue_those_begun_since(self, heard_s: float) -> None:
        """Looks once everybody has heard, as of then: uvloop's sleeps end up to a millisecond early."""
        await asyncio.sleep(heard_s - time.monotonic())
        for generation in self._placed():
            if self.losses.is_forgotten(generation.asked_s, heard_s):
                self._continue_forgotten(generation)

    def continue_placed(self, cause: str) -> None:
        for generation in self._placed():
            self.continue_elsewhere(generation, cause)

    def _placed(self) -> list[Generation]:
        return [each for each in self.open.values() if each.placement is not None and not each.is_over]

    def _continue_if_lost(self, generation: Generation, placement: Placement, since_s: float) -> None:
        gone = self.losses.find_lost(placement, generation.attempt_tokens, since_s)
        if gone is not None:
            self._continue_without(generation, placement, gone)

    def _continue_without(self, generation: Generation, placement: Placement, gone: InstanceGone) -> None:
        former = find_former(placement, generation.attempt_tokens, gone)
        if former is not None:
            generation.former = former
        self.continue_elsewhere(generation, InstanceLost.code)

    # placing

    def _settle(
        self, generation: Generation, request: GenerationRequest, placement: Placement, started_s: float
    ) -> None:
        """Keeps the placement of the current attempt; one that nobody wants any more is cancelled there."""
        if generation.request.attempt != request.attempt:
            self.notices.cancel_placement(request, placement)
            return
        placement = generation.place(placement)
        generation.asked_s = started_s
        generation.history.note_placed(time.monotonic(), placement.prefill_instance)
        generation.former = None
        if generation.is_over:
            # Its stop string overtook this placement.
            self.notices.tell_ended(generation)
            return
        if request.request_id not in self.open:
            return
        if self.losses.is_forgotten(started_s, time.monotonic()):
            self._continue_forgotten(generation)
            return
        self._continue_if_lost(generation, placement, started_s)

    def continue_elsewhere(self, generation: Generation, cause: str, delay_s: float = 0.0) -> None:
        if generation.continuations >= self.config.gateway.max_continuations:
            generation.fail(InstanceLost(broken_text(generation.continuations, cause)))
            return
        self._note_continued(generation, cause)
        self.notices.cancel_attempt(generation)
        generation.continue_elsewhere()
        self.spawn(self._place_again(generation, delay_s))

    def _continue_forgotten(self, generation: Generation) -> None:
        """Its instances dropped it with all the others, and will at each other scheduler's word, too: nothing
        of it has broken. Of itself it does not come again, as a lease must run out first."""
        self._note_continued(generation, DECLARED_GONE)
        self.notices.cancel_attempt(generation)
        generation.next_attempt()
        self.spawn(self._place_again(generation, 0.0))

    def _submit_again(self, generation: Generation) -> None:
        if generation.resubmissions >= MAX_RESUBMISSIONS:
            # No error that invites its client to try again.
            generation.fail(
                InternalError(f"{generation.resubmissions + 1} schedulers died before it was placed")
            )
            return
        self._note_continued(generation, "scheduler_gone")
        generation.submit_again()
        self.spawn(self._place_again(generation, 0.0))

    def _note_continued(self, generation: Generation, cause: str) -> None:
        request, now = generation.request, time.monotonic()
        if generation.placement is not None:
            generation.wanted_s = now
        generation.history.note_broken(now, cause)
        log.warning("sequence_continued", extra={"request": request.request_id, "cause": cause})
        generation.continued.append(SpanEvent("resume", now, {"lamella.cause": cause}))
        self.metrics.continuations.labels(cause).inc()
        timeline.mark(CONTINUED, request.request_id, request.attempt)

    async def _place_again(self, generation: Generation, delay_s: float) -> None:
        """Until it is placed, refused for good, or superseded by yet another attempt."""
        deadline_s = time.monotonic() + CONTINUE_DEADLINE_S
        attempt = generation.request.attempt
        request_id = generation.request.request_id
        await asyncio.sleep(delay_s)
        while not generation.is_over and generation.request.attempt == attempt and request_id in self.open:
            try:
                await self.submissions.submit(generation)
            except FOR_LATER as exc:
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
