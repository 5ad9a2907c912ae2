"""Changes instances' roles by policy, where this scheduler leads: looks, decides, tells, and keeps why."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI, Response

from common.bus import Bus
from common.config import MeshConfig, RolesConfig
from common.errors import BusError, RequestError
from common.http import READ
from common.ids import InstanceId
from common.messages import FlipProgress, FlipRole, Role, has_phase
from common.performance import queue_s
from common.subjects import Subjects
from scheduler.policy.roles import RoleChange, RolePolicy, Worker, role_policy
from scheduler.state import SchedulerState
from scheduler.views import InstanceView

log = logging.getLogger("lamella.scheduler")

KEPT_CHANGES = 256


class RoleChanged(msgspec.Struct, frozen=True):
    """``at_s``: on this scheduler's clock. ``refusal``: why it was not changed after all."""

    at_s: float
    instance_id: InstanceId
    role: Role
    reason: str
    refusal: str | None = None


@dataclass(slots=True)
class RoleChanges:
    """``leading_epoch``: of this scheduler's reign; None: another one leads."""

    settings: RolesConfig
    state: SchedulerState
    bus: Bus
    subjects: Subjects
    mesh: MeshConfig
    leading_epoch: Callable[[], int | None]
    changes: deque[RoleChanged] = field(default_factory=lambda: deque(maxlen=KEPT_CHANGES))

    def add_routes(self, app: FastAPI) -> None:
        """``/roles``: what this scheduler has changed, and why; the newest first."""

        @app.api_route("/roles", methods=READ)
        async def newest() -> Response:
            content = msgspec.json.encode(list(reversed(self.changes)))
            return Response(content, media_type="application/json")

    async def run(self) -> None:
        """Runs until cancelled. Who begins to lead has seen nothing before."""
        loop = asyncio.get_running_loop()
        policy: RolePolicy | None = None
        while True:
            await asyncio.sleep(self.settings.look_s)
            if self.leading_epoch() is None:
                policy = None
                continue
            policy = policy or role_policy(self.settings)
            if policy is None:
                return
            change = policy.decide(workers_of(self.state), loop.time())
            if change is not None:
                await self._carry_out(change)

    async def _carry_out(self, change: RoleChange) -> None:
        epoch = self.leading_epoch()
        if epoch is None:
            return
        refusal = None
        try:
            await self.bus.call(
                self.subjects.instance_calls(change.instance_id),
                FlipRole(change.role, epoch, change.keeps_home),
                FlipProgress,
                self.mesh.call_timeout_s,
            )
        except (BusError, RequestError) as exc:
            refusal = str(exc)
        fields = {"instance": change.instance_id, "role": change.role, "reason": change.reason}
        if refusal is None:
            log.info("role_changed", extra=fields)
        else:
            log.warning("role_unchanged", extra={**fields, "error": refusal})
        now = asyncio.get_running_loop().time()
        self.changes.append(RoleChanged(now, change.instance_id, change.role, change.reason, refusal))


def workers_of(state: SchedulerState) -> list[Worker]:
    """Those that are ready. What waits at the scheduler for those that prefill counts as in their queues."""
    views = [view for view in state.instances.values() if view.is_ready]
    serving = sum(has_phase(view.role, "prefill") for view in views)
    return [worker_of(view, state.waiting.tokens // max(1, serving)) for view in views]


def worker_of(view: InstanceView, waiting_tokens: int) -> Worker:
    """Of one that is ready. ``waiting_tokens``: its share of what waits at the scheduler, if it prefills."""
    report, prefill, decode = view.report, view.for_prefill, view.for_decode
    assert report is not None, "it is ready"
    chunk_time = prefill.chunk_time
    queue_tokens = prefill.pending_tokens + waiting_tokens * has_phase(view.role, "prefill")
    waiting_s = None if chunk_time is None else queue_s(chunk_time, queue_tokens, prefill.chunk_tokens)
    return Worker(
        instance_id=view.record.instance_id,
        role=report.role,
        home=view.home,
        queue_tokens=queue_tokens,
        queue_s=waiting_s,
        prompts=view.booked.unreported + report.pending_prefill_requests + report.handovers_waiting,
        kv_share=decode.context_tokens / max(1, view.capacity_tokens),
        decodes=decode.requests,
        waiting=report.decode_waiting,
        coming=decode.requests - report.decode_running - report.decode_waiting,
    )
