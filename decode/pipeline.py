"""Batches that take turns on one model replica: while one is at attention, another's slice is computed.

Rotational staggered pipelining with n = 2 batches on one replica (Lamina 2, section 4.3; Lamina 1, 5.1.1),
where no context has to migrate. Every batch has a lane of its own to each attention worker. All slices run on
the engine's thread, in the order in which their attention comes back.
"""

import asyncio
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from common.engine_thread import EngineThread
from common.messages import SampledToken
from common.model.exchange import Waiting
from common.model.runner import ModelRunner
from common.steps import SequenceStep
from common.timeline import timeline
from common.timeline_events import DECODE_STEP, WAIT_OUTPUT
from decode.remote_attention import RemoteAttention

Tokens = list[SampledToken | None]

LONG_WAIT_S = 0.05
"""After this the oldest batch is waited for alone, which notices who is gone."""


@dataclass(slots=True)
class Course:
    """One step under way: ``layer``'s attention is awaited, since ``waits_ns`` where a timeline records."""

    batch: Sequence[SequenceStep]
    requests: str
    steps: Generator[int, None, Tokens]
    attention: RemoteAttention
    result: "asyncio.Future[Tokens]"
    began_ns: int
    layer: int = -1
    waits_ns: int = 0


@dataclass(slots=True)
class StaggeredEngine:
    """``replicas``: per lane, the model over that lane's attention. One step a lane at a time."""

    engine: EngineThread
    replicas: Sequence[tuple[ModelRunner, RemoteAttention]]
    _submitted: deque[tuple[int, Sequence[SequenceStep], str, "asyncio.Future[Tokens]"]] = field(
        default_factory=deque
    )
    _turning: "asyncio.Task[None] | None" = None

    @property
    def lanes(self) -> int:
        return len(self.replicas)

    async def run(self, lane: int, batch: Sequence[SequenceStep], requests: str = "") -> Tokens:
        """The step's tokens. ``requests``: their ids, for a timeline. Raises what the step raises."""
        result: asyncio.Future[Tokens] = asyncio.get_running_loop().create_future()
        self._submitted.append((lane, batch, requests, result))
        if self._turning is None:
            self._turning = asyncio.create_task(self._turn())
        return await result

    async def _turn(self) -> None:
        """Keeps the thread at work as long as there is any."""
        try:
            while self._submitted:
                await self.engine.run(self._alternate)
        finally:
            self._turning = None

    @torch.inference_mode()
    def _alternate(self) -> None:
        courses: deque[Course] = deque()
        waiting = Waiting()
        while True:
            while self._submitted:
                lane, batch, requests, result = self._submitted.popleft()
                runner, attention = self.replicas[lane]
                course = runner.course(batch)
                courses.append(Course(batch, requests, course, attention, result, timeline.begin()))
            if not courses:
                return
            ready = next((each for each in courses if self._is_ready(each)), None)
            if ready is None and waiting.waited_s > LONG_WAIT_S:
                ready = courses[0]
            if ready is None:
                waiting.pause()
                continue
            waiting.restart()
            courses.remove(ready)
            if self._advance(ready):
                courses.append(ready)
            else:
                self.engine.share_cores()

    def _is_ready(self, course: Course) -> bool:
        return course.layer < 0 or course.attention.has_answer(course.layer)

    def _advance(self, course: Course) -> bool:
        """Computes one slice. False where it was the step's last."""
        if course.waits_ns:
            timeline.end(course.waits_ns, WAIT_OUTPUT, course.layer)
        loop = course.result.get_loop()
        try:
            course.layer = next(course.steps)
        except StopIteration as end:
            loop.call_soon_threadsafe(_set_result, course.result, end.value)
        except Exception as exc:
            loop.call_soon_threadsafe(_set_exception, course.result, exc)
        else:
            course.waits_ns = timeline.begin()
            return True
        if course.began_ns:
            context_tokens = sum(step.start for step in course.batch)
            timeline.end(
                course.began_ns, DECODE_STEP, len(course.batch), context_tokens, requests=course.requests
            )
        return False


def _set_result(result: "asyncio.Future[Tokens]", tokens: Tokens) -> None:
    if not result.done():
        result.set_result(tokens)


def _set_exception(result: "asyncio.Future[Tokens]", error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
