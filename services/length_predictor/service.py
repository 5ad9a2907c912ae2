"""`lamella serve predictor`: answers PredictLength, and hears from RequestEnded how right it was."""

import asyncio
import time
from dataclasses import dataclass, field

from common.config import Config
from common.errors import Overloaded
from common.ids import RequestId
from common.lengths import capped
from common.messages import PredictedLength, PredictLength, RequestEnded, SchedulerEvent
from common.predictions import NewestLengths
from common.service import Running, ServiceProcess, run_service
from services.length_predictor.metrics import PredictorMetrics
from services.length_predictor.predictors import LengthPredictor, predictor_of

QUEUE_GROUP = "predictor"
MAX_WAITING = 64
"""Questions at once. A prediction is of use for as long as the prompt is prefilled, not for longer."""


@dataclass(slots=True)
class PredictorService:
    predictor: LengthPredictor
    metrics: PredictorMetrics
    _answered: NewestLengths[RequestId] = field(default_factory=NewestLengths)
    _waiting: int = 0

    async def answer(self, question: PredictLength) -> PredictedLength:
        """Raises Overloaded, or whatever the predictor raises."""
        if self._waiting >= MAX_WAITING:
            self.metrics.refused()
            raise Overloaded(f"{MAX_WAITING} predictions are being made already", retry_after_s=1.0)
        # The loop's own clock stands still within a turn, and counts milliseconds.
        began_s = time.perf_counter()
        self._waiting += 1
        try:
            lengths = capped(await self.predictor.predict(question), question.max_tokens)
        finally:
            self._waiting -= 1
        self.metrics.observe_prediction(time.perf_counter() - began_s)
        self._answered.keep(question.request_id, lengths)
        return PredictedLength(lengths)

    def take_event(self, message: SchedulerEvent) -> None:
        """Of what schedulers hear, the end of requests. One cut short by its client says nothing."""
        if not isinstance(message, RequestEnded):
            return
        lengths = self._answered.forget(message.request_id)
        if message.output_tokens is None:
            return
        self.predictor.learn(message.prompt_tokens, message.output_tokens, is_cut=message.is_cut)
        if lengths is not None:
            self.metrics.observe_outcome(message.output_tokens - lengths.mean)


async def run_predictor(config: Config) -> None:
    """Runs one length predictor until it is told to stop."""
    await run_service(config, "predictor", _start)


async def _start(process: ServiceProcess) -> Running:
    predictor = await asyncio.to_thread(predictor_of, process.config.predictor, process.config.model)
    service = PredictorService(predictor, PredictorMetrics(process.registry))
    subjects = process.subjects
    await process.bus.subscribe(subjects.scheduler_events(), SchedulerEvent, service.take_event)
    await process.bus.serve(subjects.predict(), PredictLength, service.answer, queue=QUEUE_GROUP)

    async def drain(timeout_s: float) -> None:
        """Questions at hand are answered when the bus closes."""

    async def close() -> None:
        await asyncio.to_thread(predictor.close)

    return Running(process.record("predictor"), drain, close)
