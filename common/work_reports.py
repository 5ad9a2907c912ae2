"""What an instance tells of work that is done: to the gateways whose requests it was for, and to watchers.

Nobody waits for it and nothing depends on it: what the bus cannot take is lost.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.bus import Bus
from common.errors import BusError
from common.ids import GatewayId, InstanceId
from common.messages import LinkTraffic, Work, WorkDone
from common.subjects import Subjects

log = logging.getLogger("lamella.instance")

TRAFFIC_WINDOW_S = 1.0


@dataclass(slots=True)
class WorkReports:
    """``run`` tells of the links' traffic as long as there is any."""

    instance_id: InstanceId
    bus: Bus
    subjects: Subjects
    _sent_bytes: Counter[InstanceId] = field(default_factory=Counter)

    def tell(self, done: Iterable[tuple[GatewayId, Work]]) -> None:
        """Each gateway once, of what was done for it."""
        work_of: dict[GatewayId, list[Work]] = {}
        for gateway_id, work in done:
            work_of.setdefault(gateway_id, []).append(work)
        for gateway_id, works in work_of.items():
            self._publish(self.subjects.gateway_events(gateway_id), WorkDone(self.instance_id, tuple(works)))

    def note_sent(self, peer: InstanceId, kv_bytes: int) -> None:
        self._sent_bytes[peer] += kv_bytes

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(TRAFFIC_WINDOW_S)
            if self._sent_bytes:
                sent_bytes, self._sent_bytes = dict(self._sent_bytes), Counter()
                traffic = LinkTraffic(self.instance_id, TRAFFIC_WINDOW_S, sent_bytes)
                self._publish(self.subjects.link_traffic(), traffic)

    def _publish(self, subject: str, message: WorkDone | LinkTraffic) -> None:
        try:
            self.bus.publish(subject, message)
        except BusError as exc:
            log.warning("work_untold", extra={"subject": subject, "error": str(exc)})
