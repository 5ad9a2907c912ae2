"""Carries the scheduler's plans out in virtual time: the live planner's, as ``scheduler.scaling`` drives it
and the launcher follows it (``services.launcher.autoscale``)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from common.config import Config
from common.ids import RequestId
from common.messages import GenerationRequest, RequestEnded, Role
from common.messages.bookings import BookingsChanged
from scheduler.arrivals import Arrivals
from scheduler.planning import LOOKS_PER_WINDOW, MeshSight, Plan, Planner, look_at
from scheduler.state import SchedulerState
from services.launcher.autoscale import FOLLOWING_LOAD, MOST_INTERVAL_S
from services.simulator.clock import Clock
from services.simulator.staff import Staff


@dataclass(slots=True)
class Autoscaling:
    """``open_mail`` lets the state know what it has been told by now. ``plans``: all of them, and when they
    were made. While one is carried out nobody looks at others."""

    config: Config
    clock: Clock
    state: SchedulerState
    staff: Staff
    open_mail: Callable[[], None]
    planner: Planner = field(init=False)
    arrivals: Arrivals = field(default_factory=Arrivals)
    plans: list[tuple[float, Plan]] = field(default_factory=list)
    _followed: int = 0
    _is_scaling: bool = False
    _due_s: float = 0.0

    def __post_init__(self) -> None:
        self.planner = Planner(self.config, self.clock.now)

    def start(self) -> None:
        window_s = self.config.scaling.window_s
        self._due_s = self.clock.now + window_s
        self._every(window_s / LOOKS_PER_WINDOW, self._look)
        if self.config.scaling.policy == "on":
            self._every(min(MOST_INTERVAL_S, window_s / 4), self._follow)

    def note_submitted(self, request: GenerationRequest) -> None:
        """One that has drawn tokens is no new request."""
        if not request.output_ids:
            self._hear(request.request_id, len(request.prompt_ids))

    def note_peer(self, message: BookingsChanged) -> None:
        """Before the state is told."""
        for each in message.bookings:
            if each.booked is not None:
                self._hear(each.request_id, each.booked.prompt_tokens)

    def _hear(self, request_id: RequestId, prompt_tokens: int) -> None:
        now = self.clock.now
        if self.arrivals.is_new(request_id, now, is_here=self._is_here(request_id)):
            self.planner.profiler.arrive(prompt_tokens, now)

    def note_ended(self, ended: RequestEnded) -> None:
        """Before the state is told."""
        request_id = ended.request_id
        self.arrivals.note_ended(request_id, self.clock.now, is_here=self._is_here(request_id))
        if ended.output_tokens is not None:
            self.planner.profiler.end(ended.output_tokens)

    def _is_here(self, request_id: RequestId) -> bool:
        return request_id in self.state.requests or request_id in self.state.waiting

    def _every(self, interval_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            self.clock.after(interval_s, act)

        self.clock.after(interval_s, act)

    def _look(self) -> None:
        self.open_mail()
        sight, now = self._sight(), self.clock.now
        if now < self._due_s:
            self.planner.look(sight)
            return
        self._due_s = max(self._due_s + self.config.scaling.window_s, now)
        self.plans.append((now, self.planner.plan(sight, now)))

    def _sight(self) -> MeshSight:
        objectives, state = self.config.objectives, self.state
        return look_at(
            state.instances.values(),
            len(state.members.gateways),
            0,
            len(state.requests),
            objectives.ttft_s,
            objectives.tpot_s,
            state.waiting.tokens,
        )

    def _follow(self) -> None:
        if self._is_scaling or len(self.plans) == self._followed:
            return
        self._followed = len(self.plans)
        _, plan = self.plans[-1]
        counts = [
            each for each in plan.counts if each.desired != each.current and each.service in FOLLOWING_LOAD
        ]
        if counts:
            self._is_scaling = True
            self.staff.scale_roles(
                [(cast(Role, each.service), each.desired) for each in counts], self._settle
            )

    def _settle(self) -> None:
        self._is_scaling = False
