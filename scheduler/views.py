"""An instance, and a request that was placed, as the scheduler sees them."""

from dataclasses import dataclass, field

from common.ids import GatewayId, RequestId
from common.messages import InstanceRecord, LoadReport, Placement, Role


@dataclass(slots=True)
class PlacedRequest:
    """``acknowledged_s``: when the prefill instance took it over. ``is_reported``: a load report has it.
    ``is_void``: an instance of the placement left before that; nobody counts it, and it only says that the
    request is still wanted. ``expected_tokens``: that it will draw."""

    placement: Placement
    attempt: int
    gateway_id: GatewayId
    prompt_tokens: int
    expected_tokens: float = 0.0
    is_heavy: bool = False
    acknowledged_s: float | None = None
    is_reported: bool = False
    is_void: bool = False


@dataclass(slots=True)
class InstanceView:
    """One incarnation of one instance, as seen from here."""

    record: InstanceRecord
    last_heard_s: float
    report: LoadReport | None = None
    is_suspect: bool = False
    placed: set[RequestId] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.report is not None and not self.report.is_draining and not self.is_suspect

    @property
    def is_idle(self) -> bool:
        """It reported no work of any kind."""
        report = self.report
        return report is not None and not (
            report.pending_prefill_requests
            or report.handovers_waiting
            or report.decode_running
            or report.decode_waiting
        )

    @property
    def role(self) -> Role:
        return self.record.role if self.report is None else self.report.role

    @property
    def capacity_tokens(self) -> int:
        """Of all sequences together."""
        pools = self.record if self.report is None else self.report
        return pools.total_blocks * self.record.block_size

    @property
    def longest_tokens(self) -> int:
        """Of one sequence, which lives in one pool; its pools are attention workers', which come and go."""
        pools = self.record if self.report is None else self.report
        return pools.largest_pool_blocks * self.record.block_size

    @property
    def longest_tokens_at_start(self) -> int:
        return self.record.largest_pool_blocks * self.record.block_size
