"""Plans the number of workers, window by window, and tells everyone: bus, store, HTTP and metrics.

The latest plan stays in the store when the scheduler is gone. Of several schedulers the leader plans.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI, Response

from common.bus import Bus
from common.config import Config
from common.errors import BusError, StoreError
from common.http import READ
from common.ids import RequestId
from common.messages import GenerationRequest, MemberRecord, RequestEnded, ServiceRecord
from common.messages.bookings import BookingsChanged
from common.scaling import DesiredCounts
from common.store import Store
from common.subjects import Subjects
from scheduler.arrivals import Arrivals
from scheduler.metrics import ScalingMetrics
from scheduler.planning import LOOKS_PER_WINDOW, MeshSight, Plan, Planner, look_at
from scheduler.state import SchedulerState

log = logging.getLogger("lamella.scheduler")


@dataclass(slots=True)
class Scaling:
    """``leading_epoch``: of this scheduler's reign; None: another one leads."""

    planner: Planner
    state: SchedulerState
    bus: Bus
    store: Store
    subjects: Subjects
    metrics: ScalingMetrics
    config: Config
    leading_epoch: Callable[[], int | None]
    latest: DesiredCounts | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    _attention_workers: int = 0

    def note_submitted(self, request: GenerationRequest) -> None:
        """To this scheduler. One that has drawn tokens is no new request, whoever forgot it."""
        if not request.output_ids:
            self._hear(request.request_id, len(request.prompt_ids))

    def note_peer(self, message: BookingsChanged) -> None:
        """What another scheduler was given. To be heard before the state hears it: it is news only once."""
        if message.incarnation == self.state.bookings.incarnation:
            return
        for each in message.bookings:
            if each.booked is not None:
                self._hear(each.request_id, each.booked.prompt_tokens)

    def note_ended(self, message: RequestEnded) -> None:
        """To be told before the state is."""
        request_id = message.request_id
        self.arrivals.note_ended(request_id, _now_s(), is_here=self._is_here(request_id))
        if message.output_tokens is not None:
            self.planner.profiler.end(message.output_tokens)

    def note_members(self, records: list[MemberRecord]) -> None:
        kinds = [record.kind for record in records if isinstance(record, ServiceRecord)]
        self._attention_workers = kinds.count("attention")

    async def run(self) -> None:
        """A plan at every window's end. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        window_s = self.config.scaling.window_s
        due_s = loop.time() + window_s
        while True:
            await asyncio.sleep(window_s / LOOKS_PER_WINDOW)
            sight, now = self._look(), loop.time()
            if now < due_s:
                self.planner.look(sight)
                continue
            due_s = max(due_s + window_s, now)
            plan, epoch = self.planner.plan(sight, now), self.leading_epoch()
            if epoch is not None:
                await self._publish(plan, epoch)

    def add_routes(self, app: FastAPI) -> None:
        """``/scaling``: the latest plan of this scheduler."""

        @app.api_route("/scaling", methods=READ)
        async def latest() -> Response:
            status = 404 if self.latest is None else 200
            return Response(msgspec.json.encode(self.latest), status, media_type="application/json")

    def _hear(self, request_id: RequestId, prompt_tokens: int) -> None:
        now = _now_s()
        if self.arrivals.is_new(request_id, now, is_here=self._is_here(request_id)):
            self.planner.profiler.arrive(prompt_tokens, now)

    def _is_here(self, request_id: RequestId) -> bool:
        """Booked, or one that waits here while it asks several in turn."""
        return request_id in self.state.requests or request_id in self.state.waiting

    def _look(self) -> MeshSight:
        objectives = self.config.objectives
        return look_at(
            self.state.instances.values(),
            len(self.state.members.gateways),
            self._attention_workers,
            len(self.state.requests),
            objectives.ttft_s,
            objectives.tpot_s,
            self.state.waiting.tokens,
        )

    async def _publish(self, plan: Plan, epoch: int) -> None:
        counts = DesiredCounts(
            counts=plan.counts,
            epoch=epoch,
            decided_unix_s=time.time(),
            rate_per_s=plan.workload.rate_per_s,
            prompt_tokens=plan.workload.prompts.mean,
            output_tokens=plan.workload.outputs.mean,
            changed=plan.changed,
        )
        self._note_changes(counts)
        self.latest = counts
        for each in counts.counts:
            self.metrics.observe(each.service, each.current, each.desired)
        try:
            self.bus.publish(self.subjects.scaling(), counts)
            await self.store.write_plan(counts)
        except (BusError, StoreError) as exc:
            log.warning("plan_unpublished", extra={"error": str(exc)})

    def _note_changes(self, counts: DesiredCounts) -> None:
        if counts.changed:
            log.info("workload_changed", extra={"parameters": ", ".join(counts.changed)})
        before = {} if self.latest is None else {each.service: each.desired for each in self.latest.counts}
        for each in counts.counts:
            if each.desired != before.get(each.service, each.current):
                log.info(
                    "scaling_planned",
                    extra={"role": each.service, "desired": each.desired, "reason": each.reason},
                )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
