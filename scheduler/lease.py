"""Whether this scheduler leads: by its lease in the store, and by what it hears of others.

Times are the scheduler's own monotonic seconds. A lease counts from before it was asked for, and ends a
margin early, so that it is over here before the store can give it to another: no clocks are compared.
"""

from dataclasses import dataclass, field

from common.epochs import EpochFence

SAFE_SHARE = 0.9
"""Of a lease. Two clocks do not differ by a tenth in how fast they run."""


@dataclass(slots=True)
class LeaderLease:
    """``others``: the epochs with which somebody else leads, or has led."""

    lease_s: float
    others: EpochFence = field(default_factory=EpochFence)
    _epoch: int | None = None
    _until_s: float = 0.0

    def epoch_at(self, now: float) -> int | None:
        """With which it leads; None: it does not."""
        return self._epoch if now < self._until_s else None

    def grant(self, epoch: int, asked_s: float) -> None:
        """The store has given it the lead, or the same lead for longer. Overtaken meanwhile, it has none."""
        if epoch >= self.others.highest:
            self._epoch, self._until_s = epoch, asked_s + self.lease_s * SAFE_SHARE

    def hear(self, epoch: int) -> None:
        """Somebody else leads with it."""
        self.others.note(epoch)
        if self._epoch is not None and epoch > self._epoch:
            self.give_up()

    def give_up(self) -> None:
        self._epoch = None
        self._until_s = 0.0
