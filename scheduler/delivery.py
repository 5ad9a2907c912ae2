"""A request's way to its prefill instance: whom it is offered to, one after another, and what is said where
nobody takes it.

Live (``scheduler.service``) and simulated (``services.simulator``) schedulers carry it out alike.
"""

from dataclasses import dataclass

from common.errors import NoInstanceReady, Overloaded, RequestCancelled, RequestError
from common.ids import InstanceId
from common.messages import GenerationRequest, Placement, PrefillTask
from scheduler.events import InstanceSuspected, SchedulerStateEvent, TaskAcknowledged, TaskUndelivered
from scheduler.policy.decode_binding import is_bound_late
from scheduler.state import SchedulerState

NO_ANSWER = "no prefill instance answered"
NO_ANSWER_RETRY_S = 1.0


@dataclass(slots=True)
class Delivery:
    """``attempts``: at instances, that are left, one at least (``[scheduler] dispatch_attempts``). ``bound``:
    where it is booked already. ``refusal``: the last one that was answered. ``excluded``: who was tried in
    vain."""

    state: SchedulerState
    request: GenerationRequest
    attempts: int
    bound: Placement | None = None
    refusal: RequestError | None = None
    excluded: frozenset[InstanceId] = frozenset()

    def place(self, now: float) -> Placement:
        """The next one that it is to be offered to, booked. Raises what is to be told where there is none:
        that of a placement, or where others were tried in vain and nobody else is there, their refusal."""
        if self.attempts == 0:
            raise self._refused()
        self.attempts -= 1
        if self.bound is not None:
            placement, self.bound = self.bound, None
            return placement
        try:
            return self.state.place(self.request, now, self.excluded)
        except NoInstanceReady:
            if self.excluded:
                raise self._refused() from None
            raise

    def task(self, placement: Placement) -> PrefillTask:
        """What is handed over."""
        request, decode = self.request, placement.decode_instance
        is_late = is_bound_late(self.state.settings.decode_binding, placement.prefill_instance, decode)
        lengths = self.state.placer.predict(request)
        return PrefillTask(request, decode, placement.decode_incarnation, lengths, is_late)

    def succeed(self) -> SchedulerStateEvent:
        """It was taken: the event to be handled."""
        return TaskAcknowledged(self.request.request_id, self.request.attempt)

    def fail(
        self, placement: Placement, answer: RequestError | None
    ) -> tuple[list[SchedulerStateEvent], RequestError | None]:
        """``answer``: the refusal; None: there was none. The events to be handled, and what is to be told;
        None: it is to be placed anew."""
        request_id, attempt = self.request.request_id, self.request.attempt
        is_wanted = self.state.is_placed(request_id, attempt)
        happened: list[SchedulerStateEvent] = [TaskUndelivered(request_id, attempt)]
        if answer is None:
            happened.append(InstanceSuspected(placement.prefill_instance))
        elif isinstance(answer, Overloaded | NoInstanceReady):
            self.refusal = answer
        else:
            return happened, answer
        if not is_wanted:
            return happened, RequestCancelled(f"request {request_id} ended while it was placed")
        self.excluded |= {placement.prefill_instance}
        return happened, None

    def _refused(self) -> RequestError:
        return self.refusal or NoInstanceReady(NO_ANSWER, retry_after_s=NO_ANSWER_RETRY_S)
