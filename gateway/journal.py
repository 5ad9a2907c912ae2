"""Every open choice of this gateway, and the way its tokens find it.

A choice ends here whatever happens: finished, stopped, failed or left by its client; then everybody is told.
How it comes to its instances, and to others when that broke, is ``gateway.attempts``'.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.errors import InternalError, NoInstanceReady, RequestError
from common.ids import GatewayId, InstanceId, RequestId
from common.messages import (
    Announcement,
    GatewayEvent,
    GatewayGone,
    InstanceGone,
    SchedulerGone,
    SequenceFailed,
    SequenceMoved,
    TokenBatch,
    TokenEvent,
    WorkDone,
    as_request_error,
)
from common.subjects import Subjects
from common.timeline import EventId, timeline
from common.timeline_events import FAILED, FINISHED, LEFT, OPEN_REQUESTS, RECEIVED, REFUSED, TAKE_TOKENS
from gateway.attempts import Attempts
from gateway.generation import Generation
from gateway.judge import Judge
from gateway.metrics import GatewayMetrics
from gateway.notices import Notices
from gateway.request_views import RequestEnd, RequestLog, end_of

log = logging.getLogger("lamella.gateway")

MARKS: dict[RequestEnd, EventId] = {
    "finished": FINISHED,
    "failed": FAILED,
    "refused": REFUSED,
    "left": LEFT,
}


@dataclass(slots=True)
class Journal:
    """``spawn`` starts a task in the process's task group. ``tokens``: taken in so far, of all choices."""

    gateway_id: GatewayId
    config: Config
    bus: Bus
    subjects: Subjects
    metrics: GatewayMetrics
    spawn: Callable[[Coroutine[None, None, None]], None]
    open: dict[RequestId, Generation] = field(default_factory=dict)
    tokens: int = 0
    judge: Judge = field(init=False)
    requests: RequestLog = field(init=False)
    _notices: Notices = field(init=False)
    _attempts: Attempts = field(init=False)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.judge = Judge(self.config, self.metrics)
        self.requests = RequestLog(self.open)
        self._notices = Notices(self.bus, self.subjects)
        self._attempts = Attempts(
            self.config, self.bus, self.subjects, self._notices, self.metrics, self.open, self.spawn
        )

    # what the HTTP side asks for

    async def start(self, generation: Generation) -> None:
        """Opens the entry and places it. Raises the refusal; the entry is then closed again."""
        self.open[generation.request.request_id] = generation
        timeline.mark(RECEIVED, generation.request.request_id)
        self.requests.note_change()
        self._note_size()
        try:
            await self._attempts.start(generation)
        except RequestError:
            self._close(generation, is_refused=True)
            raise

    def end(self, generation: Generation) -> None:
        """Closes the entry and tells whoever still works for it. Safe to call twice."""
        if generation.request.request_id in self.open:
            self._close(generation)
            self._attempts.submissions.tell_ended(generation)

    async def wait_empty(self) -> None:
        self._note_size()
        await self._empty.wait()

    # what befalls them all

    def continue_all(self) -> None:
        """The bus was away: tokens may be lost without a later one that shows the gap."""
        self._attempts.continue_placed("bus_reconnect")

    def fail_all(self, why: str) -> None:
        """Open streams end with an error their clients can act on."""
        for generation in list(self.open.values()):
            generation.fail(NoInstanceReady(why))

    # what the bus brings

    def take(self, message: GatewayEvent | Announcement) -> None:
        match message:
            case TokenBatch():
                self._take_tokens(message)
            case SequenceFailed():
                self._take_failure(message)
            case SequenceMoved():
                self._take_move(message)
            case WorkDone():
                self._take_work(message)
            case InstanceGone():
                self._attempts.take_instance_gone(message)
            case SchedulerGone():
                self._attempts.take_scheduler_gone(message)
            case GatewayGone():
                if message.gateway_id == self.gateway_id:
                    self._attempts.take_declared_gone()

    def _take_tokens(self, batch: TokenBatch) -> None:
        began_ns = timeline.begin()
        now = time.monotonic()
        taken = 0
        for event in batch.tokens:
            generation = self.open.get(event.request_id)
            if generation is None or event.attempt < generation.request.attempt:
                # An instance that works for a forgotten attempt: told once per token until it hears.
                if event.finish_reason is None:
                    self._notices.cancel_at(batch.instance_id, event.request_id, event.attempt)
                continue
            try:
                taken += self._take_token(generation, event, now, batch.instance_id)
            except Exception:
                # One sequence's defect must not cost the others their tokens.
                log.exception("token_failed", extra={"request": event.request_id})
                generation.fail(InternalError("internal error"))
        self.tokens += taken
        self.metrics.generation_tokens.inc(taken)
        if began_ns:
            ids = " ".join(event.request_id for event in batch.tokens)
            timeline.end(began_ns, TAKE_TOKENS, taken, requests=ids, peer=batch.instance_id)

    def _take_token(
        self, generation: Generation, event: TokenEvent, now: float, instance_id: InstanceId
    ) -> bool:
        verdict = generation.take(event)
        if verdict == "taken":
            if generation.history.note_token(now, instance_id):
                self.requests.note_change()
            self.judge.note_token(generation, now)
            if generation.is_over:
                self._take_end(generation, event)
            generation.notify(generation)
            return True
        if verdict == "gap":
            self.metrics.stream_gaps.inc()
            self._attempts.continue_elsewhere(generation, "gap")
        return False

    def _take_end(self, generation: Generation, last: TokenEvent) -> None:
        """The sequence is over, though its client may not have everything yet."""
        if generation.placement is None:
            # It came before the answer to its submission, which tells when it comes.
            return
        if last.finish_reason is None:
            # A stop string: only the gateway knows of it.
            self._notices.cancel_attempt(generation)
        self._notices.tell_schedulers(generation)

    def _take_work(self, message: WorkDone) -> None:
        now = time.monotonic()
        for work in message.work:
            generation = self.open.get(work.request_id)
            if generation is not None:
                generation.history.note_work(now, message.instance_id, work)

    def _take_failure(self, message: SequenceFailed) -> None:
        generation = self.open.get(message.request_id)
        if generation is None or message.attempt != generation.request.attempt or generation.is_over:
            return
        if message.can_continue:
            self._attempts.take_failure(generation, message)
        else:
            generation.fail(as_request_error(message.error))

    def _take_move(self, message: SequenceMoved) -> None:
        generation = self.open.get(message.request_id)
        if generation is None or message.attempt != generation.request.attempt or generation.is_over:
            # What told its former home so may have come too late there.
            decode_instance = message.placement.decode_instance
            self._notices.cancel_at(decode_instance, message.request_id, message.attempt)
            return
        self._attempts.take_move(generation, message)

    # endings

    def _close(self, generation: Generation, *, is_refused: bool = False) -> None:
        self.open.pop(generation.request.request_id, None)
        self.judge.judge(generation, is_refused)
        self.requests.end(generation, time.monotonic(), is_refused=is_refused)
        timeline.mark(MARKS[end_of(generation, is_refused)], generation.request.request_id)
        self._note_size()

    def _note_size(self) -> None:
        self.metrics.open_requests.set(len(self.open))
        timeline.count(OPEN_REQUESTS, len(self.open))
        if self.open:
            self._empty.clear()
        else:
            self._empty.set()
