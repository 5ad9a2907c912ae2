"""When the number of workers changes, and to what: Aladdin 5.2 and DistServe's replanning (4.3).

What a workload needs is first estimated from learned speeds (``worker_counts``). Once there is enough history
it is the line of Aladdin's eq. 7 through (rate, workers that kept the objectives): where the estimate's
workers missed them, one more counts; where fewer kept them, those do. The line holds for one pattern of
lengths: when lengths change, it is learned anew. Where it has kept more workers than the estimate through a
long calm it is doubted, and the estimate holds until the next miss: what was missed may have had another
cause than the load, and with workers to spare nothing would ever say so. Each doubt that was wrong makes the
next one come twice as late.

Up at once, at a change point without even a pause after the last step; down only to the most that any window
of ``down_after_s`` would have needed at a somewhat higher rate, so that noise around a border moves nothing.
A miss keeps what there is for as long.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from common.config import ScalingConfig
from scheduler.policy.fitting import LinearFit
from scheduler.policy.worker_counts import Need

TRUSTED_ERROR = 0.25
"""Relative, of the line, and of the rate that it is asked for (Aladdin's R)."""
DOUBTED_AFTER = 10.0
"""Times ``down_after_s`` (a window at least) without a miss, and the line is doubted for the first time."""
LATE_SHARE = 0.1
"""Of a window's looks at the mesh: more late ones than the goal allows, and the objectives were missed."""


@dataclass(slots=True)
class WorkerLaw:
    """Aladdin's eq. 7: workers as a line over the rate, between the lowest and the highest rate seen."""

    _fit: LinearFit = field(default_factory=lambda: LinearFit(2))
    _lowest: float = math.inf
    _highest: float = 0.0

    def observe(self, rate_per_s: float, workers: int) -> None:
        """So many kept the objectives."""
        self._fit.observe((rate_per_s, 1.0), float(workers))
        self._lowest = min(self._lowest, rate_per_s)
        self._highest = max(self._highest, rate_per_s)

    def workers(self, rate_per_s: float, estimate: int) -> int | None:
        """Beyond the rates it has seen it only bounds the estimate. None while there is no line to trust.

        What it has learned from are whole workers, rounded up already: the nearest whole number of the line
        is eq. 7's ceiling.
        """
        fitted = self._fit.fitted
        if fitted is None or fitted.relative_error > TRUSTED_ERROR or fitted.coefficients[0] < 0:
            return None
        inside = min(max(rate_per_s, self._lowest), self._highest)
        found = max(1, round(fitted.seconds((inside, 1.0))))
        if rate_per_s > self._highest:
            return max(found, estimate)
        return min(found, estimate) if rate_per_s < self._lowest else found


@dataclass(frozen=True, slots=True)
class Asked:
    """What a window says of one service. ``need``: at its rate; ``need_higher``: at one that is higher by the
    margin of scaling down. ``was_missed``: more than the goal's share was late."""

    rate_per_s: float
    need: Need
    need_higher: Need
    was_missed: bool
    has_changed: bool
    is_sure: bool


@dataclass(slots=True)
class LawDoubt:
    """``_calm_s``: that the line has asked for more than the estimate since the last miss. Times in which it
    asks for no more say nothing of it, however calm they are."""

    first_patience_s: float
    is_doubted: bool = False
    _wrong: int = 0
    _calm_s: float = 0.0
    _noted_s: float | None = None

    def note(self, *, is_kept: bool, was_missed: bool, now: float) -> None:
        """A window's end. ``is_kept``: the line asks for more than the estimate."""
        if was_missed:
            self._calm_s = 0.0
            self._wrong += self.is_doubted
        elif is_kept and self._noted_s is not None:
            self._calm_s += now - self._noted_s
        self._noted_s = now
        patience_s = self.first_patience_s * 2**self._wrong
        self.is_doubted = is_kept and not was_missed and self._calm_s >= patience_s


@dataclass(slots=True)
class ServiceScaler:
    """One service's count over time. ``least`` and ``most`` are the operator's, and hold always."""

    settings: ScalingConfig
    least: int
    most: int
    law: WorkerLaw = field(default_factory=WorkerLaw)
    doubt: LawDoubt = field(init=False)
    desired: int | None = None
    _has_moved: bool = False
    _changed_s: float = -math.inf
    _held_until_s: float = -math.inf
    _enough: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.forget_law()

    def forget_law(self) -> None:
        """Requests are of another kind now."""
        self.law = WorkerLaw()
        self.doubt = LawDoubt(DOUBTED_AFTER * max(self.settings.down_after_s, self.settings.window_s))

    def keep(self, current: int, why: str, now: float) -> tuple[int, str]:
        """Nothing is known: as many as there are, within the limits. A single window says little after it."""
        self._held_until_s = now + self.settings.down_after_s
        if self.desired is None or not self._has_moved:
            self.desired = max(self.desired or 0, current)
        self.desired = self._within(self.desired)
        return self.desired, why

    def decide(self, current: int, asked: Asked, now: float) -> tuple[int, str]:
        """How many there should be from now on, and why. To be called at every window's end."""
        if self.desired is None:
            self.desired, self._changed_s = current, now
        if not self._has_moved:
            # The operator's own, of which some may still have been starting.
            self.desired = max(self.desired, current)
        before = self.desired = self._within(self.desired)
        was_missed = asked.was_missed and current >= before
        self._learn(current, asked, was_missed)
        self.doubt.note(is_kept=self._asks_for_more(asked), was_missed=was_missed, now=now)
        wanted, how = self._wanted(asked.rate_per_s, asked.need, asked.is_sure)
        if was_missed:
            self._held_until_s = now + self.settings.down_after_s
            if current + 1 > wanted:
                wanted, how = current + 1, "one more: objectives were missed"
        self._note_enough(max(wanted, self._enough_for(asked)), now)
        self.desired, said = self._moved(before, wanted, asked.has_changed, now)
        if self.desired != before:
            self._changed_s, self._has_moved = now, True
        return self.desired, f"{asked.need.why}: {wanted} needed ({how}){said}"

    def _within(self, count: int) -> int:
        return min(self.most, max(self.least, count))

    def _learn(self, current: int, asked: Asked, was_missed: bool) -> None:
        """Of windows in which nothing was on its way. That more than the estimate kept the objectives says
        nothing: perhaps fewer would have, too."""
        is_settled = current == self.desired and not asked.has_changed
        if not asked.is_sure or not is_settled or asked.rate_per_s <= 0 or current < 1:
            return
        if was_missed:
            self.law.observe(asked.rate_per_s, max(current + 1, asked.need.workers))
        elif current <= asked.need.workers:
            self.law.observe(asked.rate_per_s, current)

    def _wanted(self, rate_per_s: float, need: Need, is_sure: bool) -> tuple[int, str]:
        workers = self._by_law(rate_per_s, need.workers) if is_sure else None
        return (need.workers, "estimated") if workers is None else (workers, "by what kept the objectives")

    def _enough_for(self, asked: Asked) -> int:
        """At the higher rate. Who is not sure enough of the rate to grow by the line does not shrink against
        it either: the two would take turns."""
        estimate = asked.need_higher.workers
        known = self._by_law(asked.rate_per_s * (1 + self.settings.down_margin), estimate)
        if known is None:
            return estimate
        return known if asked.is_sure else max(known, estimate)

    def _asks_for_more(self, asked: Asked) -> bool:
        """The line, than the estimate, now or at the higher rate."""
        higher_per_s = asked.rate_per_s * (1 + self.settings.down_margin)
        for rate_per_s, need in ((asked.rate_per_s, asked.need), (higher_per_s, asked.need_higher)):
            if (self.law.workers(rate_per_s, need.workers) or 0) > need.workers:
                return True
        return False

    def _by_law(self, rate_per_s: float, estimate: int) -> int | None:
        """None while it is not to be believed."""
        return None if self.doubt.is_doubted else self.law.workers(rate_per_s, estimate)

    def _note_enough(self, workers: int, now: float) -> None:
        self._enough.append((now, workers))
        while now - self._enough[0][0] > self.settings.down_after_s:
            self._enough.popleft()

    def _moved(self, before: int, wanted: int, has_changed: bool, now: float) -> tuple[int, str]:
        """From ``before`` to what is wanted, as far as limits, pauses and caution let it."""
        target = self._within(wanted)
        said = "" if target == wanted else f", {target} allowed"
        if target > before:
            if has_changed or now - self._changed_s >= self.settings.up_cooldown_s:
                return target, said
            return before, f"{said}, after a pause of {self.settings.up_cooldown_s:g} s"
        enough = self._within(max(workers for _, workers in self._enough))
        if enough >= before:
            return before, said
        is_calm = now - self._changed_s >= self.settings.down_after_s and now >= self._held_until_s
        if not is_calm:
            return before, f"{said}, fewer once {self.settings.down_after_s:g} s were calm"
        return enough, said if enough == target else f", {enough} within {self.settings.down_after_s:g} s"
