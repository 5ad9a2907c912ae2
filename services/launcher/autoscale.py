"""Carries out the scheduler's plans: how many workers there are follows how many are wanted.

Whoever starts and ends workers gives ``follow_plans`` two functions: one reads the latest plan, one makes the
counts so. A plan of an earlier leader is refused, and so is one that was there before: it is of another life.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from common.epochs import EpochFence
from common.errors import LamellaError, StoreError
from common.scaling import DesiredCounts, ScaledService, ServiceCount

log = logging.getLogger("lamella.autoscale")

MOST_INTERVAL_S = 1.0
FOLLOWING_LOAD: frozenset[ScaledService] = frozenset(("prefill", "decode", "mixed", "attention"))
"""Of the services that are planned, those there may be several of where a gateway has the one port."""

ReadPlan = Callable[[], Awaitable[DesiredCounts | None]]
Scale = Callable[[Mapping[ScaledService, int]], Awaitable[None]]
"""Returns when there are as many; raises a LamellaError where that cannot be."""


async def follow_plans(
    read_plan: ReadPlan, scale: Scale, scaled: frozenset[ScaledService], window_s: float, *, is_dry_run: bool
) -> None:
    """Runs until cancelled. ``scaled``: what this place can have more or fewer of; ``window_s``: how often
    there is a new plan. A plan that fails is not tried again: the next one knows more."""
    fence = EpochFence()
    told: Mapping[ScaledService, int] = {}
    seen = await _try_read(read_plan)
    if seen is not None:
        fence.note(seen.epoch)
    while True:
        await asyncio.sleep(min(MOST_INTERVAL_S, window_s / 4))
        plan = await _try_read(read_plan)
        if plan is None or plan == seen:
            continue
        seen = plan
        try:
            fence.admit(plan.epoch)
            due = [each for each in plan.counts if each.desired != each.current and each.service in scaled]
            if is_dry_run:
                # What has been said is not said again at every window's end.
                _say([each for each in due if told.get(each.service) != each.desired], "would_scale")
                told = {each.service: each.desired for each in plan.counts}
            elif due:
                _say(due, "scaling")
                await scale({each.service: each.desired for each in due})
        except LamellaError as exc:
            log.warning("plan_not_carried_out", extra={"error": str(exc)})


async def _try_read(read_plan: ReadPlan) -> DesiredCounts | None:
    try:
        return await read_plan()
    except StoreError as exc:
        log.warning("plan_unread", extra={"error": str(exc)})
        return None


def _say(due: Iterable[ServiceCount], event: str) -> None:
    for each in due:
        log.info(
            event,
            extra={
                "role": each.service,
                "current": each.current,
                "desired": each.desired,
                "reason": each.reason,
            },
        )
