"""Of those who could take a request, whom KV gets from and to, by what is known of the links between them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from common.ids import InstanceId
from scheduler.kv_links import Distrust
from scheduler.views import InstanceView

NOBODY: Mapping[InstanceId, str] = {}


class Trusted(NamedTuple):
    """``left_out``: who is not taken, and why."""

    views: list[InstanceView]
    left_out: Mapping[InstanceId, str]


def trusted_senders(
    distrust: Distrust | None, views: list[InstanceView], receivers: Iterable[InstanceView]
) -> Trusted:
    """Mixed ones may decode what they compute themselves."""
    if distrust is None:
        return Trusted(views, NOBODY)
    senders = [view.instance_id for view in views if view.role == "prefill"]
    receiver_ids = [view.instance_id for view in receivers]
    taken = set(distrust.senders(senders, receiver_ids, is_anybody_else=len(senders) < len(views)))
    kept = [view for view in views if view.role != "prefill" or view.instance_id in taken]
    return Trusted(kept, {each: distrust.reason(each, None) for each in senders if each not in taken})


def trusted_receivers(
    distrust: Distrust | None, sender: InstanceView | None, views: list[InstanceView]
) -> Trusted:
    """``sender``: None where no KV is to be moved."""
    if distrust is None or sender is None:
        return Trusted(views, NOBODY)
    sender_id, able = sender.instance_id, [view.instance_id for view in views]
    taken = set(distrust.receivers(sender_id, able))
    kept = [view for view in views if view.instance_id in taken]
    return Trusted(kept, {each: distrust.reason(each, sender_id) for each in able if each not in taken})
