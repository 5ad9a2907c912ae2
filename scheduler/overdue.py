"""Bookings whose end was never heard: its word was lost with a connection, or came while nobody listened.

Which they are nobody says, but reports say how many requests there are. A booking that is dropped though its
request lives costs nothing: loads count what instances report wherever that is more.
"""

from collections.abc import Collection, Mapping

from common.ids import RequestId
from scheduler.views import InstanceView, PlacedRequest


def find_overdue(
    requests: Mapping[RequestId, PlacedRequest], instances: Collection[InstanceView], before_s: float
) -> list[RequestId]:
    """Of those that were acknowledged before ``before_s``, and so before every report was made: who is
    counted at no instance that is known, and, oldest first, as many as are more than all instances report."""
    counted = set[RequestId]().union(*(view.placed for view in instances))
    old = [
        (placed.acknowledged_s, request_id)
        for request_id, placed in requests.items()
        if placed.acknowledged_s is not None and placed.acknowledged_s < before_s
    ]
    homeless = [request_id for _, request_id in old if request_id not in counted]
    standing = sorted(each for each in old if each[1] in counted)
    reported = [view.reported_requests for view in instances]
    known = sum(each for each in reported if each is not None)
    excess = 0 if None in reported else max(0, len(standing) - known)
    return homeless + [request_id for _, request_id in standing[:excess]]
