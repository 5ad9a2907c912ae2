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
from common.messages import FlipProgress, FlipRole, Role
from common.subjects import Subjects
from scheduler.policy.roles import RoleChange, RolePolicy, role_policy
from scheduler.state import SchedulerState
from scheduler.workers import workers_of

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
