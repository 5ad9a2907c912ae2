"""Tells the mesh what the scheduler has concluded: who is gone, how long an output is expected to be, which
sequence had better leave where memory is running out."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.bus import Bus
from common.errors import BusError
from common.messages import (
    Announcement,
    AttentionGone,
    GatewayGone,
    InstanceGone,
    LeaveSequence,
    LengthPredicted,
    SchedulerGone,
)
from common.subjects import Subjects
from scheduler import events
from scheduler.metrics import SchedulerMetrics
from scheduler.policy.decode_rebalancing import Departure

log = logging.getLogger("lamella.scheduler")

Conclusion = (
    events.AnnounceInstanceGone
    | events.AnnounceAttentionGone
    | events.AnnounceGatewayGone
    | events.AnnounceSchedulerGone
    | events.TellLength
    | events.AskToLeave
)


@dataclass(frozen=True, slots=True)
class Announcer:
    """``leading_epoch``: None where this scheduler does not lead."""

    bus: Bus
    subjects: Subjects
    metrics: SchedulerMetrics
    leading_epoch: Callable[[], int | None]

    def announce(self, conclusion: Conclusion) -> None:
        """A bus that is away costs the word, which is logged."""
        match conclusion:
            case events.AnnounceInstanceGone(instance_id, incarnation, was_leaving, is_former):
                facts = {"instance": instance_id, "incarnation": incarnation}
                if is_former:
                    log.info("former_life_gone", extra=facts)
                else:
                    level = logging.INFO if was_leaving else logging.WARNING
                    log.log(level, "instance_gone", extra={**facts, "was_leaving": was_leaving})
                self._tell_everyone(InstanceGone(instance_id, incarnation))
            case events.AnnounceAttentionGone(worker_id, incarnation, was_leaving):
                facts = {"worker": worker_id, "incarnation": incarnation}
                level = logging.INFO if was_leaving else logging.WARNING
                log.log(level, "attention_worker_gone", extra={**facts, "was_leaving": was_leaving})
                self._tell_everyone(AttentionGone(worker_id, incarnation))
            case events.AnnounceGatewayGone(gateway_id):
                log.warning("gateway_gone", extra={"gateway": gateway_id})
                self._tell_everyone(GatewayGone(gateway_id))
            case events.AnnounceSchedulerGone(scheduler_id, gone):
                log.warning("scheduler_gone", extra={"scheduler": scheduler_id})
                self._tell_everyone(SchedulerGone(scheduler_id, gone))
            case events.TellLength(decode_instance, request_id, attempt, lengths):
                subject = self.subjects.instance_events(decode_instance)
                self._publish(subject, LengthPredicted(request_id, attempt, lengths))
            case events.AskToLeave(departure):
                self._ask_to_leave(departure)

    def _ask_to_leave(self, departure: Departure) -> None:
        """Whoever has lost the lead meanwhile asks nobody."""
        epoch, sequence = self.leading_epoch(), departure.sequence
        if epoch is None:
            return
        log.info(
            "sequence_asked_to_leave",
            extra={
                "request": sequence.request_id,
                "from_instance": departure.source,
                "to_instance": departure.destination,
                "tokens": sequence.tokens,
                "has_begun": sequence.has_begun,
            },
        )
        self.metrics.asked_to_leave()
        leave = LeaveSequence(sequence.request_id, sequence.attempt, departure.destination, epoch)
        self._publish(self.subjects.instance_events(departure.source), leave)

    def _tell_everyone(self, message: Announcement) -> None:
        self._publish(self.subjects.everyone(), message)

    def _publish(self, subject: str, message: Announcement | LengthPredicted | LeaveSequence) -> None:
        try:
            self.bus.publish(subject, message)
        except BusError as exc:
            log.warning("announcement_unsent", extra={"error": str(exc)})
