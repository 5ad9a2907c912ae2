"""Who is there: the records under their leases, and word of who leaves and who leads."""

from typing import Literal

import msgspec

from common.ids import GatewayId, Incarnation, InstanceId
from common.messages.roles import Role
from common.performance import FittedTime

ServiceKind = Literal["gateway", "scheduler", "attention", "predictor"]
"""What runs without weights of its own."""


class InstanceLife(msgspec.Struct, frozen=True):
    """One incarnation of one instance."""

    instance_id: InstanceId
    incarnation: Incarnation


class InstanceRecord(msgspec.Struct, frozen=True, tag="instance", kw_only=True):
    """What an instance writes into the store under its lease; its pools are as they were at its start.
    ``device``: the kind that it computes on. ``home``: the role that it goes back to. ``chunk_time`` and
    ``step_time``: how long its chunks and steps take, as it has learned (Aladdin 3), or of its profile."""

    instance_id: InstanceId
    incarnation: Incarnation
    role: Role
    model: str
    host: str
    pid: int
    http_url: str
    block_size: int
    total_blocks: int
    largest_pool_blocks: int
    context_length: int
    dtype: str
    device: str = "cpu"
    home: Role | None = None
    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None

    @property
    def life(self) -> InstanceLife:
        return InstanceLife(self.instance_id, self.incarnation)

    @property
    def kv_format(self) -> tuple[str, str, int]:
        """KV moves only between equal ones: model, element type, tokens per block."""
        return self.model, self.dtype, self.block_size

    @property
    def kind(self) -> tuple[str, str, str]:
        """Those of one kind compute alike: model, element type, kind of device."""
        return self.model, self.dtype, self.device


class ServiceRecord(msgspec.Struct, frozen=True, tag="service", kw_only=True):
    """What a service without weights writes into the store under its lease. ``private_url``: a gateway's, for
    operators. ``is_draining``: it finishes what it has and ends."""

    service_id: str
    incarnation: Incarnation
    kind: ServiceKind
    host: str
    pid: int
    http_url: str
    private_url: str | None = None
    is_draining: bool = False


MemberRecord = InstanceRecord | ServiceRecord


class LeaderAnnounced(msgspec.Struct, frozen=True, tag="leader"):
    """scheduler → schedulers, instances, launchers, as long as it leads: lower epochs are over.
    ``is_leaving``: it leads no more."""

    scheduler_id: str
    incarnation: Incarnation
    epoch: int
    is_leaving: bool = False


class InstanceGone(msgspec.Struct, frozen=True, tag="gone"):
    """scheduler → everyone: this incarnation is no longer a member. Another one may be."""

    instance_id: InstanceId
    incarnation: Incarnation


class AttentionGone(msgspec.Struct, frozen=True, tag="attention-gone"):
    """scheduler → decode instances: that life of an attention worker is over."""

    worker_id: str
    incarnation: Incarnation


class AreYouThere(msgspec.Struct, frozen=True, tag="there"):
    """scheduler → instance or attention worker, which acknowledges it: where nobody serves its calls its
    process has ended, or is cut off."""


class GatewayGone(msgspec.Struct, frozen=True, tag="gateway-gone"):
    """scheduler → instances: nobody reads this gateway's tokens any more."""

    gateway_id: GatewayId


class SchedulerGone(msgspec.Struct, frozen=True, tag="scheduler-gone"):
    """scheduler → gateways: that one has died; who waits for an answer to a submission may wait in vain."""

    scheduler_id: str
    incarnation: Incarnation


Announcement = InstanceGone | AttentionGone | GatewayGone | SchedulerGone
"""What the scheduler tells everyone."""
