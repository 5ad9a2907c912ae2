"""Which requests are new to the mesh: every scheduler hears of one several times, and of some by others only.

Attempts do not say it: a first one may have been refused, or have died with the scheduler that had it, and
only a later one be booked.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.ids import RequestId
from scheduler.bookings import MOST_REMEMBERED, REMEMBERED_S


@dataclass(slots=True)
class Arrivals:
    """Remembers each request for ``REMEMBERED_S`` after the last word of it; one that is booked, or waits,
    is known without that (``is_here``)."""

    _heard_s: OrderedDict[RequestId, float] = field(default_factory=OrderedDict)

    def is_new(self, request_id: RequestId, now: float, *, is_here: bool) -> bool:
        """Of one that was submitted or booked; from now on it is not."""
        is_known = is_here or request_id in self._heard_s
        self._hear(request_id, now)
        return not is_known

    def note_ended(self, request_id: RequestId, now: float, *, is_here: bool) -> None:
        """An attempt, after which another may come. Of a request that is not known it is no first word."""
        if is_here or request_id in self._heard_s:
            self._hear(request_id, now)

    def _hear(self, request_id: RequestId, now: float) -> None:
        self._heard_s.pop(request_id, None)
        self._heard_s[request_id] = now
        while len(self._heard_s) > MOST_REMEMBERED or now - next(iter(self._heard_s.values())) > REMEMBERED_S:
            self._heard_s.popitem(last=False)
