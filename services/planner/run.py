"""Has a plan searched: prepares it, drives the search, and keeps what was simulated."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from common.errors import ServiceError
from services.commands.options import messages
from services.planner.checkpoint import Checkpoint
from services.planner.driver import drive, simulating
from services.planner.planning import Plan, plan
from services.planner.preparing import PlanRequest, Prepared, bounds_of, prepare
from services.planner.probes import Search
from services.planner.searches import SearchName, SearchReport, search_of

Found = TypeVar("Found")


class Interrupted(ServiceError):
    """Ctrl-C. What was simulated is kept where a checkpoint was named."""


def make_plan(request: PlanRequest, processes: int | None = None, checkpoint: Path | None = None) -> Plan:
    """Raises ConfigError and what reading files raises; Interrupted."""

    def search(prepared: Prepared) -> Search[Plan]:
        return plan(prepared.kinds, bounds_of(prepared), prepared.demand, len(prepared.conditions.rows))

    return _search(request, search, processes, checkpoint)


def make_search(
    name: SearchName, request: PlanRequest, processes: int | None = None, checkpoint: Path | None = None
) -> SearchReport:
    """As ``make_plan``."""
    return _search(request, lambda prepared: search_of(name, prepared), processes, checkpoint)


def _search(
    request: PlanRequest,
    search: Callable[[Prepared], Search[Found]],
    processes: int | None,
    checkpoint: Path | None,
) -> Found:
    prepared = prepare(request)
    begun = search(prepared)
    context = prepared.conditions.encoded()
    with Checkpoint(checkpoint) as kept, messages.status("planning") as status:
        known, done = len(kept.points), 0

        def tell(_: object) -> None:
            nonlocal done
            done += 1
            status.update(f"planning: {done} runs simulated, {known} known before")

        try:
            with simulating(prepared.conditions, processes or len(os.sched_getaffinity(0))) as simulate:
                return drive(begun, simulate, kept, context, tell)
        except KeyboardInterrupt:
            where = "and none is kept without --checkpoint" if checkpoint is None else f"kept in {checkpoint}"
            raise Interrupted(f"interrupted after {done} runs, {where}") from None
