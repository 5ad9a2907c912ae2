"""What a gateway tells of its requests: instances to forget an attempt, everybody that a request is over."""

import logging
from dataclasses import dataclass

from common.bus import Bus
from common.errors import BusError
from common.ids import InstanceId, RequestId
from common.messages import CancelRequest, GenerationRequest, Placement, RequestEnded
from common.subjects import Subjects
from gateway.generation import Generation

log = logging.getLogger("lamella.gateway")


@dataclass(frozen=True, slots=True)
class Notices:
    """Published, so nobody answers. While the bus is away they are lost; the next token of a forgotten
    attempt has it cancelled again."""

    bus: Bus
    subjects: Subjects

    def tell_ended(self, generation: Generation) -> None:
        """To whoever still works for it, and to schedulers. Safe to call twice."""
        if generation.is_told:
            return
        self.cancel_attempt(generation)
        self.tell_schedulers(generation)

    def tell_schedulers(self, generation: Generation) -> None:
        """The last word on a request."""
        generation.is_told = True
        self.publish_ended(generation)

    def publish_ended(self, generation: Generation) -> None:
        """Nothing is learned of a probe: what users ask for is predicted by what users asked for."""
        request = generation.request
        is_learned_from = generation.finish_reason is not None and not generation.is_probe
        drawn = len(generation.output_ids) if is_learned_from else None
        is_cut = generation.finish_reason == "length"
        measured = (None, None) if drawn is None else (generation.ttft_s, generation.tpot_s)
        prompt_tokens, attempt = len(request.prompt_ids), request.attempt
        ended = RequestEnded(request.request_id, prompt_tokens, drawn, is_cut, *measured, attempt)
        self._publish(self.subjects.scheduler_events(), ended)

    def end_attempt(self, request: GenerationRequest) -> None:
        """Of a submission that was not answered: it may have been placed nevertheless."""
        ended = RequestEnded(request.request_id, attempt=request.attempt)
        self._publish(self.subjects.scheduler_events(), ended)

    def cancel_attempt(self, generation: Generation) -> None:
        if generation.placement is not None:
            self.cancel_placement(generation.request, generation.placement)

    def cancel_placement(self, request: GenerationRequest, placement: Placement) -> None:
        for instance_id in {placement.prefill_instance, placement.decode_instance}:
            self.cancel_at(instance_id, request.request_id, request.attempt)

    def cancel_at(self, instance_id: InstanceId, request_id: RequestId, attempt: int) -> None:
        self._publish(self.subjects.instance_events(instance_id), CancelRequest(request_id, attempt))

    def _publish(self, subject: str, message: CancelRequest | RequestEnded) -> None:
        try:
            self.bus.publish(subject, message)
        except BusError as exc:
            facts = {"request": message.request_id, "subject": subject, "error": str(exc)}
            log.warning("publish_failed", extra=facts)
