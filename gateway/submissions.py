"""The calls to schedulers that are under way: each asks for the placement of one attempt of one request."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from common.bus import Bus
from common.config import Config
from common.errors import (
    BusError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    RequestCancelled,
)
from common.ids import RequestId
from common.messages import GenerationRequest, Placement, SubmitAnswer, SubmitRequest
from common.subjects import Subjects
from common.timeline import timeline
from common.timeline_events import PLACE_REQUEST, PLACED
from gateway.errors import from_bus
from gateway.generation import Generation
from gateway.notices import Notices


class Submission(NamedTuple):
    """``answered`` is what is waited for: the task's end, or that another submission has taken its place."""

    task: asyncio.Task[None]
    answered: asyncio.Future[None]


Settle = Callable[[Generation, GenerationRequest, Placement, float], None]
"""Takes the placement of an attempt, and the time since which it was asked for."""


@dataclass(slots=True)
class Submissions:
    """``open``: the journal's entries, whose clients wait."""

    config: Config
    bus: Bus
    subjects: Subjects
    notices: Notices
    open: Mapping[RequestId, Generation]
    settle: Settle
    _under_way: dict[RequestId, Submission] = field(default_factory=dict)

    async def submit(self, generation: Generation) -> None:
        """Submits the current attempt. Raises the refusal.

        Kept going when the client leaves: only its end tells where there is something to cancel.
        """
        request_id = generation.request.request_id
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._place(generation, generation.request))
        submission = self._under_way[request_id] = Submission(task, answered)
        task.add_done_callback(lambda _: self._end_submission(request_id, submission))
        await answered

    def tell_ended(self, generation: Generation) -> None:
        """Once nothing is under way for it: word of its end that overtakes the submission would find nothing
        to end."""
        submission = self._under_way.get(generation.request.request_id)
        if submission is None:
            self.notices.tell_ended(generation)
            return
        if generation.is_queued:
            self.notices.publish_ended(generation)
        submission.task.add_done_callback(lambda _: self.notices.tell_ended(generation))

    def take_over(self, supersede: Callable[[Generation], None]) -> None:
        """Nobody waits any more for what is under way: ``supersede`` begins each one's next attempt, but for
        those whose tokens have all come without a placement."""
        for request_id, submission in list(self._under_way.items()):
            generation = self.open.get(request_id)
            if generation is None or generation.placement is not None:
                continue
            if not generation.is_over:
                supersede(generation)
            if not submission.answered.done():
                submission.answered.set_result(None)

    def _end_submission(self, request_id: RequestId, submission: Submission) -> None:
        if self._under_way.get(request_id) is submission:
            del self._under_way[request_id]
        task, answered = submission
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if answered.done():
            return
        if error is None:
            answered.set_result(None)
        else:
            answered.set_exception(error)

    async def _place(self, generation: Generation, request: GenerationRequest) -> None:
        started_s = time.monotonic()
        began_ns = timeline.begin()
        mesh, attempts = self.config.mesh, self.config.scheduler.dispatch_attempts
        # One call for each, and one to the instance that may go on with the KV that is kept.
        timeout_s = mesh.call_timeout_s * (attempts + 1 + (generation.former is not None))
        # Told once: an instance that has begun anew since, and is heard of, is not to be suspected again.
        lost, generation.lost_instances = generation.lost_instances, ()
        try:
            wanted_for_s = started_s - generation.wanted_s
            message = SubmitRequest(request, lost, generation.former, wanted_for_s=wanted_for_s)
            placement = await self._ask_placement(generation, message, timeout_s)
        except MessageTooLarge as exc:
            raise InvalidRequest(f"the prompt does not fit a message: {exc}", param="prompt") from exc
        except InternalError:
            # The scheduler's defect came amid its placing: what is booked would stand for ever.
            self.notices.end_attempt(request)
            raise
        except BusError as exc:
            generation.lost_instances = lost + generation.lost_instances
            # It may have been placed nevertheless; its tokens would be answered with a cancellation.
            self.notices.end_attempt(request)
            raise from_bus(exc) from exc
        timeline.end(began_ns, PLACE_REQUEST, request.attempt, requests=request.request_id)
        timeline.mark(PLACED, request.request_id)
        self.settle(generation, request, placement, started_s)

    async def _ask_placement(
        self, generation: Generation, message: SubmitRequest, timeout_s: float
    ) -> Placement:
        """As often as its scheduler says that it still waits. Raises BusError, the refusal, RequestCancelled
        once nobody waits for it, and DeadlineExceeded."""
        request, asked_s = message.request, time.monotonic()
        while True:
            answer = await self.bus.call(self.subjects.submit(), message, SubmitAnswer, timeout_s)
            if isinstance(answer, Placement):
                return answer
            if generation.request.attempt != request.attempt or request.request_id not in self.open:
                raise RequestCancelled("nobody waits for it any more")
            generation.is_queued = True
            if time.monotonic() - generation.arrived_s > self.config.gateway.token_timeout_s:
                raise DeadlineExceeded("no instance had room within gateway.token_timeout_s")
            now = time.monotonic()
            wanted_for_s = now - generation.wanted_s
            message = SubmitRequest(request, waited_s=now - asked_s, wanted_for_s=wanted_for_s)
