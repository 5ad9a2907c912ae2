"""How much KV is pulled in the gap between two decode steps, so that running streams are hardly delayed.

Lamina 2, section 5: attention workers take prefill's KV in the gaps between decode steps. A portion is as
large as the measured transfer rate moves within a share of the measured step time; never so small that it is
all overhead, so a pull always comes to its end. What it leaves of that time the next one may take, if it is
enough for the least portion, or for one as they mostly are: a short prompt's takes a moment, however few
bytes it has, and by its rate the least portion would take many steps. While no step runs a portion is larger,
and still bounded: what is asked for then may be in the air when the next step begins.

A share that is never exceeded lets those queue that wait for their KV, while there is memory for them and
time on the link: within 0.2 of a link of 25 GB/s a decode instance of LLaMA2-70B takes 13 requests of 1,150
tokens a second, whatever else it could do. So where those that wait are a larger share of its sequences,
theirs counts; and where what is pulled takes nothing of what steps need, all of a step's time does.

Each decode instance keeps to a budget of its own. What is not bounded: the sum over instances that pull from
one prefill instance, or into one attention worker, at once.
"""

from dataclasses import dataclass

LEAST_PORTION_BYTES = 1 << 18
IDLE_PORTIONS_S = 0.03
"""How long what is in the air may delay a step that begins; enough for a question to each portion to cost
nothing."""
UNMEASURED_IDLE_BYTES = 1 << 22
"""Those of a link of 1 Gbit/s."""
GENTLE_SHARE = 0.2
NEWEST_WEIGHT = 0.2
"""Of the newest step, or portion, in what is measured."""


def share_of_steps(configured: float | None, *, is_shared: bool) -> float:
    """``is_shared``: steps need what pulls take, the processor that computes them and copies KV. An
    accelerator's memory takes KV in beside what it computes; over a link of 25 GB/s a layer's exchange with
    attention workers (a batch of 50 of LLaMA2-70B: 1 MB) is some 40 us longer beside a pull.
    """
    if configured is not None:
        return configured
    return GENTLE_SHARE if is_shared else 1.0


@dataclass(slots=True)
class PullBudget:
    """``share``: of the step time, at least. What has not been measured yet allows the least portion."""

    share: float = GENTLE_SHARE
    least_bytes: int = LEAST_PORTION_BYTES
    _step_s: float = 0.0
    _portion_bytes: float = 0.0
    _portion_s: float = 0.0
    _newest_bytes_per_s: float = 0.0

    def allowed_s(self, lanes: int = 1, pulls: int = 0, decoding: int = 1) -> float:
        """How long what is asked for after a step may be in the air, beside ``decoding`` sequences, of which
        there is at least one, by so many pulls. Steps of so many lanes are under way, and each one's end lets
        some ask: together they keep to the share."""
        return max(self.share, pulls / (pulls + decoding)) * self._step_s / lanes

    def portion_bytes(self, allowed_s: float) -> int:
        """The largest portion to ask for in so long; more where that is less than the least."""
        if self._portion_s == 0:
            return self.least_bytes
        return max(self.least_bytes, int(allowed_s * self._bytes_per_s))

    def has_room(self, left_s: float) -> bool:
        """Whether one more is worth asking for in what others left of the time."""
        if self._portion_s == 0:
            return left_s > 0
        return left_s >= min(self._portion_s, self.least_bytes / self._bytes_per_s)

    def idle_portion_bytes(self, pulls: int) -> int:
        """The same while no step runs, for each of so many pulls under way. The newest portion's rate counts
        where it is higher: the first opened its link, too, and the next ones shall not be small for that."""
        together = UNMEASURED_IDLE_BYTES
        if self._portion_s > 0:
            together = int(IDLE_PORTIONS_S * max(self._bytes_per_s, self._newest_bytes_per_s))
        return max(self.least_bytes, together // pulls)

    @property
    def bytes_per_s(self) -> float | None:
        """At which KV comes; None: not yet measured."""
        return self._bytes_per_s if self._portion_s > 0 else None

    @property
    def _bytes_per_s(self) -> float:
        return self._portion_bytes / self._portion_s

    def step_ended(self, step_s: float, steps: int = 1) -> None:
        """So many of equal length."""
        old_weight = (1.0 - NEWEST_WEIGHT) ** steps if self._step_s else 0.0
        self._step_s = step_s + old_weight * (self._step_s - step_s)

    def portion_done(self, kv_bytes: int, transfer_s: float) -> None:
        """Bytes and seconds are weighed separately: many small portions do not outweigh a large one."""
        if kv_bytes == 0 or transfer_s <= 0:
            return
        self._newest_bytes_per_s = kv_bytes / transfer_s
        weight = NEWEST_WEIGHT if self._portion_s else 1.0
        self._portion_bytes += weight * (kv_bytes - self._portion_bytes)
        self._portion_s += weight * (transfer_s - self._portion_s)
