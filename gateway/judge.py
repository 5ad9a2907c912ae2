"""What clients see of their choices, measured as it happens and held to what was promised them."""

import time
from dataclasses import dataclass, field

from common.config import Config
from common.latency import ServiceObjectives, ttft_s
from common.service_classes import objectives_of, service_classes_of
from common.timeline import timeline
from common.timeline_events import FIRST_TOKEN, SECOND_TOKEN
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.service_levels import Ended, ServiceLevels


@dataclass(slots=True)
class Judge:
    """``levels``: of the last minute, by class."""

    config: Config
    metrics: GatewayMetrics
    levels: ServiceLevels = field(init=False)
    _objectives: dict[str, ServiceObjectives] = field(init=False)

    def __post_init__(self) -> None:
        classes = service_classes_of(self.config)
        self._objectives = {name: objectives_of(each) for name, each in classes.items()}
        self.levels = ServiceLevels(self._objectives, time.monotonic())

    def note_token(self, generation: Generation, now: float) -> None:
        """One was taken in."""
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

    def judge(self, generation: Generation, is_refused: bool) -> None:
        """By its class's objectives; whom its client left says nothing about them, nor does a probe."""
        now, service_class = time.monotonic(), generation.request.service_class
        is_served = generation.finish_reason is not None and generation.ttft_s is not None
        if generation.is_probe or not (is_served or generation.error is not None or is_refused):
            return
        latency = generation.latency(now) if is_served else None
        tokens = len(generation.output_ids)
        self.metrics.judge(service_class, self._objectives[service_class], latency, tokens)
        self.levels.add(Ended(now, service_class, latency, tokens))
