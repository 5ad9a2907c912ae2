"""Batches that take turns on model replicas: while one is at attention, others' slices are computed.

Staggered pipelining of n batches that share the attention workers, rotating over n − 1 replicas or each
fixed on one of n (Lamina 1, section 5.1; Lamina 2, 4.3); ``scheduler.policy.staggering`` says who computes
what. Every batch has a lane of its own to each attention worker, every replica a thread and a queue. A batch
whose slice is computed goes to the next replica's queue with its context (a fixed one to the same again), and
is ready there when its attention has come back. Of a replica's ready batches the one whose turn is earliest
is next.

Steps begin as they come. Fixed batches that begin at once are apart after their first layer: workers serve
one lane at a time, so that a batch's attention, and with it its next slice, comes after another's.
"""

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from common.engine_thread import EngineThread
from common.messages import SampledToken
from common.model.program import ModelProgram
from common.model.runner import ModelRunner
from common.model.waiting import Waiting
from common.steps import SequenceStep
from common.timeline import timeline
from common.timeline_events import DECODE_STEP, WAIT_BATCH, WAIT_OUTPUT
from decode.remote_attention import RemoteAttention
from scheduler.policy.staggering import Staggering

Tokens = list[SampledToken | None]

LONG_WAIT_S = 0.05
"""After this the earliest batch is waited for alone, which notices who is gone."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A model on its device, and the thread that computes its slices."""

    thread: EngineThread
    program: ModelProgram


@dataclass(slots=True)
class Course:
    """One step under way: its slice ``piece`` (of all its batch ever computed) is next, when ``layer``'s
    attention is there; awaited since ``waits_ns`` where a timeline records."""

    lane: int
    batch: Sequence[SequenceStep]
    requests: str
    result: "asyncio.Future[Tokens]"
    piece: int
    steps: Generator[int, None, Tokens]
    began_ns: int
    layer: int = -1
    waits_ns: int = 0


class StaggeredEngine:
    """``batches``: per lane, the model over that lane's attention. A lane has one step at a time.

    ``engine`` claims the process's cores while steps are under way, however many replicas compute them.
    """

    def __init__(
        self,
        engine: EngineThread,
        staggering: Staggering,
        replicas: Sequence[Replica],
        batches: Sequence[tuple[ModelRunner, RemoteAttention]],
    ) -> None:
        self._engine = engine
        self._replicas = tuple(replicas)
        self._batches = tuple(batches)
        self._staggering = staggering
        assert (len(batches), len(replicas)) == (staggering.batches, staggering.replicas)
        self._turn = -1
        self._under_way = 0
        self._lanes_in_step: set[int] = set()
        self._queues: list[list[Course]] = [[] for _ in replicas]
        self._changed = threading.Condition()
        self._serving: dict[int, asyncio.Task[None]] = {}

    @property
    def lanes(self) -> int:
        return len(self._batches)

    async def run(self, lane: int, batch: Sequence[SequenceStep], requests: str = "") -> Tokens:
        """The step's tokens. ``requests``: their ids, for a timeline. Raises what the step raises."""
        result: asyncio.Future[Tokens] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._begin(lane, batch, requests, result)
        for index in range(len(self._replicas)):
            if index not in self._serving:
                self._serving[index] = asyncio.create_task(self._keep_serving(index))
        return await result

    async def _keep_serving(self, index: int) -> None:
        """Keeps a replica's thread at work as long as there is any."""
        try:
            with self._engine.claimed():
                while self._under_way:
                    await self._replicas[index].thread.run(self._serve, index)
        finally:
            del self._serving[index]

    def _begin(
        self, lane: int, batch: Sequence[SequenceStep], requests: str, result: "asyncio.Future[Tokens]"
    ) -> None:
        piece = self._staggering.next_piece(lane, self._turn)
        following = range(piece, piece + len(self._replicas))
        programs = [self._replicas[self._staggering.replica(lane, each)].program for each in following]
        steps = self._batches[lane][0].course(batch, programs, lane)
        self._under_way += 1
        self._enqueue(Course(lane, batch, requests, result, piece, steps, timeline.begin()))

    @torch.inference_mode()
    def _serve(self, index: int) -> None:
        """Returns when no step is under way."""
        waiting = Waiting()
        computing = 0
        while (course := self._next(index, waiting)) is not None:
            now_computing = min(len(self._replicas), self._under_way)
            is_change = course.layer < 0 or now_computing != computing
            computing = now_computing
            self._advance(course, computing if is_change else None)

    def _next(self, index: int, waiting: Waiting) -> Course | None:
        """What the replica computes next, when it is ready; None when no step is under way."""
        idle_ns = 0
        while True:
            course = None
            with self._changed:
                if not self._under_way:
                    return None
                queue = self._queues[index]
                if queue:
                    course = self._take_ready(queue, waiting.waited_s > LONG_WAIT_S)
                else:
                    idle_ns = idle_ns or timeline.begin()
                    self._changed.wait()
            if course is not None:
                waiting.restart()
                timeline.end(idle_ns, WAIT_BATCH)
                return course
            if queue:
                idle_ns = idle_ns or timeline.begin()
                waiting.pause()

    def _take_ready(self, queue: list[Course], takes_any: bool) -> Course | None:
        """The earliest that is ready; with ``takes_any``, the earliest that is amid its step."""
        ready = min(
            (each for each in queue if self._is_ready(each) or (takes_any and each.layer >= 0)),
            key=self._turn_of,
            default=None,
        )
        if ready is not None:
            self._lanes_in_step.add(ready.lane)
            queue.remove(ready)
            self._turn = max(self._turn, self._turn_of(ready))
        return ready

    def _turn_of(self, course: Course) -> int:
        return self._staggering.turn(course.lane, course.piece)

    def _is_ready(self, course: Course) -> bool:
        """A lane's step does not begin before the one that somebody gave up waiting for has ended."""
        if course.layer < 0:
            return course.lane not in self._lanes_in_step
        return self._batches[course.lane][1].has_answer(course.layer)

    def _enqueue(self, course: Course) -> None:
        self._queues[self._staggering.replica(course.lane, course.piece)].append(course)
        self._changed.notify_all()

    def _advance(self, course: Course, sharing: int | None) -> None:
        """Computes one slice; takes the replica's cores anew, where so many replicas are ``sharing``."""
        if course.waits_ns:
            timeline.end(course.waits_ns, WAIT_OUTPUT, course.layer)
        try:
            if sharing is not None:
                self._engine.share_cores(sharing)
            course.layer = next(course.steps)
        except StopIteration as end:
            self._end(course, end.value, None)
        except Exception as exc:
            self._end(course, None, exc)
        else:
            course.waits_ns = timeline.begin()
            course.piece += 1
            with self._changed:
                self._enqueue(course)

    def _end(self, course: Course, tokens: Tokens | None, error: Exception | None) -> None:
        if course.began_ns:
            context_tokens = sum(step.start for step in course.batch)
            timeline.end(
                course.began_ns, DECODE_STEP, len(course.batch), context_tokens, requests=course.requests
            )
        with suppress(RuntimeError):  # whoever asked is gone, and its loop is closed
            course.result.get_loop().call_soon_threadsafe(_answer, course.result, tokens, error)
        with self._changed:
            self._under_way -= 1
            self._lanes_in_step.remove(course.lane)
            self._changed.notify_all()

    def close(self) -> None:
        """Waits for the steps at hand, takes no more. The process's engine is not this one's to close."""
        for replica in self._replicas:
            if replica.thread is not self._engine:
                replica.thread.close()


def _answer(result: "asyncio.Future[Tokens]", tokens: Tokens | None, error: Exception | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        assert tokens is not None
        result.set_result(tokens)
