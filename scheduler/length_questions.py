"""Asks the length predictor about requests that are placed: beside the delivery, never in front of it."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import PredictorConfig
from common.errors import BusError, BusTimeout, NoResponder, RequestError
from common.ids import RequestId
from common.messages import GenerationRequest, PredictedLength, PredictLength
from common.subjects import Subjects
from scheduler import events
from scheduler.metrics import SchedulerMetrics
from scheduler.placing import Placer

MAX_QUESTIONS = 256
"""To the predictor at once. Beyond that it is not asked: it would be too late, too."""


@dataclass(slots=True)
class LengthQuestions:
    """``spawn`` starts a task in the process's task group, ``handle`` takes an answer into the state."""

    settings: PredictorConfig
    placer: Placer
    bus: Bus
    subjects: Subjects
    metrics: SchedulerMetrics
    spawn: Callable[[Coroutine[None, None, None]], None]
    handle: Callable[[events.SchedulerStateEvent], None]
    _asked: set[RequestId] = field(default_factory=set)

    def ask(self, request: GenerationRequest) -> None:
        """Until the predictor answers, and where it does not, history's word holds."""
        request_id = request.request_id
        is_known = request_id in self._asked or self.placer.predicted.find(request_id) is not None
        if self.settings.kind == "none" or is_known:
            return
        if len(self._asked) >= MAX_QUESTIONS:
            self.metrics.asked_length("skipped")
            return
        self._asked.add(request_id)
        self.spawn(self._take(request))

    async def _take(self, request: GenerationRequest) -> None:
        question = PredictLength(request.request_id, request.prompt_ids, request.sampling.max_tokens)
        timeout_s = self.settings.timeout_s
        try:
            answer = await self.bus.call(self.subjects.predict(), question, PredictedLength, timeout_s)
        except NoResponder:
            self.metrics.asked_length("absent")
        except BusTimeout:
            self.metrics.asked_length("timeout")
        except (BusError, RequestError):
            self.metrics.asked_length("error")
        else:
            self.metrics.asked_length("answered")
            self.handle(events.LengthPredicted(request, answer.lengths))
        finally:
            self._asked.discard(request.request_id)
