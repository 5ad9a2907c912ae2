"""What users ask for, window by window: rate, lengths and their spread, and when these have changed.

DistServe's workload profiler (4.3) with the change points of Aladdin (5.2). Each window's mean is compared
with the mean of the windows since the last change, in units of its standard error (Aladdin's SEM), and two-
sided sums of what is beyond noise (Page's CUSUM) find a jump within its window and a drift within some. From
a change on, only what came since counts. Memory is bounded: a window is a few numbers, and so many are kept.
"""

import math
from collections import deque
from dataclasses import dataclass, field

KEPT_WINDOWS = 12
SLACK, ALARM = 0.5, 5.0
"""Standard errors that are noise, and that add up to a change: by chance alone one in some 460 windows."""
SPREAD = 1.2816
"""Standard deviations that 90 % of a normal count stay under: the attainment goal."""
TOLERANCE = 0.1
"""Changes of less than this share need no new plan, however sure they are."""
LEAST_LENGTHS = 4
"""Fewer in a window say nothing of their mean."""


@dataclass(slots=True)
class Moments:
    """Of values: how many, their sum and their squares'."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    def join(self, other: "Moments") -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else 0.0

    @property
    def squared_variation(self) -> float:
        """The coefficient of variation, squared; 0 of nothing."""
        return self.variance / self.mean**2 if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """``busy_rate_per_s``: that of a window which the goal's share of windows does not exceed; bursts and
    drifts raise it over the mean, Poisson's chance alone does not. ``arrival_variation`` is the squared
    coefficient of variation of the gaps between arrivals: 1 for Poisson's. ``prompts`` and ``outputs``:
    tokens of requests, those of outputs by their own end."""

    rate_per_s: float
    busy_rate_per_s: float
    arrival_variation: float
    prompts: Moments
    outputs: Moments
    arrivals: int

    @property
    def relative_error(self) -> float:
        """Of the tokens that arrive a second, by how few arrivals were seen (Aladdin's SEM)."""
        if not self.arrivals:
            return math.inf
        return math.sqrt((self.arrival_variation + self.prompts.squared_variation) / self.arrivals)


@dataclass(slots=True)
class Series:
    """One parameter's windows since it last changed. ``is_count``: a window is one value, of arrivals, which
    vary by Poisson's law at least."""

    is_count: bool
    windows: deque[Moments] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS))
    _above: float = 0.0
    _below: float = 0.0
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS))

    @property
    def joined(self) -> Moments:
        found = Moments()
        for window in self.windows:
            found.join(window)
        return found

    def close(self, window: Moments) -> bool:
        """Takes a window in; whether the parameter has changed. It then keeps those since the change."""
        known = self.joined
        least = 1 if self.is_count else LEAST_LENGTHS
        if window.count:
            self.windows.append(window)
        if known.count < least or window.count < least:
            return False
        errors = self._standard_errors(known, window)
        self._above = max(0.0, self._above + errors - SLACK)
        self._below = max(0.0, self._below - errors - SLACK)
        self._errors.append(errors)
        if max(self._above, self._below) < ALARM:
            return False
        self._forget_before(1 if self._above > self._below else -1)
        self._above = self._below = 0.0
        self._errors.clear()
        return True

    def _forget_before(self, sign: int) -> None:
        """Keeps the fewest of the newest windows that give the alarm by themselves: those are surely new."""
        proof = 0.0
        for since, errors in enumerate(reversed(self._errors), start=1):
            proof += sign * errors - SLACK
            if proof >= ALARM:
                while len(self.windows) > since:
                    self.windows.popleft()
                return

    def _standard_errors(self, known: Moments, window: Moments) -> float:
        """By how many the window's mean lies above the known one."""
        variance = max(known.variance, 1.0, known.mean if self.is_count else 0.0)
        noise = variance * (1 / window.count + 1 / known.count) + (TOLERANCE * known.mean) ** 2
        return (window.mean - known.mean) / math.sqrt(noise)


@dataclass(slots=True)
class WorkloadProfiler:
    """``arrive`` and ``end`` as it happens, ``close`` at each window's end. Times: seconds, monotonic."""

    _opened_s: float
    _rates: Series = field(default_factory=lambda: Series(is_count=True))
    _prompts: Series = field(default_factory=lambda: Series(is_count=False))
    _outputs: Series = field(default_factory=lambda: Series(is_count=False))
    _gaps: deque[Moments] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS))
    _durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_WINDOWS))
    _open_prompts: Moments = field(default_factory=Moments)
    _open_outputs: Moments = field(default_factory=Moments)
    _open_gaps: Moments = field(default_factory=Moments)
    _last_arrival_s: float | None = None

    def arrive(self, prompt_tokens: int, now: float) -> None:
        self._open_prompts.add(prompt_tokens)
        if self._last_arrival_s is not None:
            self._open_gaps.add(now - self._last_arrival_s)
        self._last_arrival_s = now

    def end(self, output_tokens: int) -> None:
        """A request came to its own end."""
        self._open_outputs.add(output_tokens)

    def close(self, now: float) -> tuple[str, ...]:
        """Ends the window; what has changed. Windows should be about equally long: arrivals are counted."""
        arrivals = Moments()
        arrivals.add(self._open_prompts.count)
        self._gaps.append(self._open_gaps)
        self._durations_s.append(now - self._opened_s)
        changed = [
            name
            for name, series, window in (
                ("rate", self._rates, arrivals),
                ("prompt length", self._prompts, self._open_prompts),
                ("output length", self._outputs, self._open_outputs),
            )
            if series.close(window)
        ]
        for kept in (self._gaps, self._durations_s):
            while len(kept) > len(self._rates.windows):
                kept.popleft()
        self._open_prompts, self._open_outputs, self._open_gaps = Moments(), Moments(), Moments()
        self._opened_s = now
        return tuple(changed)

    @property
    def workload(self) -> Workload | None:
        """Of the windows since each parameter changed; None before the first has ended."""
        elapsed_s = sum(self._durations_s, 0.0)
        if elapsed_s <= 0:
            return None
        gaps = Moments()
        for window in self._gaps:
            gaps.join(window)
        counts = self._rates.joined
        excess = max(0.0, counts.variance - counts.mean)
        busy = counts.total + SPREAD * math.sqrt(excess) * counts.count
        arrivals = round(counts.total)
        return Workload(
            rate_per_s=arrivals / elapsed_s,
            busy_rate_per_s=busy / elapsed_s,
            arrival_variation=gaps.squared_variation if gaps.count >= LEAST_LENGTHS else 1.0,
            prompts=self._prompts.joined,
            outputs=self._outputs.joined,
            arrivals=arrivals,
        )
