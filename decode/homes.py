"""Where a running sequence can go on that is to leave this instance: the scheduler is asked."""

from dataclasses import dataclass

from common.bus import Bus
from common.ids import InstanceId
from common.messages import GenerationRequest, InstanceLife, Placement, PlaceMoved
from common.subjects import Subjects

HOME_RETRY_S = 0.5
"""Where nobody has room now."""


@dataclass(frozen=True, slots=True)
class Homes:
    """``life``: that of this instance."""

    bus: Bus
    subjects: Subjects
    life: InstanceLife
    call_timeout_s: float

    async def find(self, request: GenerationRequest, wanted: InstanceId | None) -> Placement:
        """Who expects the sequence now: ``wanted`` if it can.

        Raises Overloaded, NoInstanceReady, InvalidRequest, BusError.
        """
        call = PlaceMoved(request, self.life, wanted)
        return await self.bus.call(self.subjects.submit(), call, Placement, self.call_timeout_s)
