"""Who may still command: leaders' epochs grow, and a receiver refuses those it has seen overtaken."""

from dataclasses import dataclass

from common.errors import LeaderSuperseded


@dataclass(slots=True)
class EpochFence:
    """At a receiver of a leader's commands. ``highest``: epoch that it has seen; it never falls."""

    highest: int = 0

    def note(self, epoch: int) -> None:
        """Somebody leads with it, or has."""
        self.highest = max(self.highest, epoch)

    def admit(self, epoch: int | None) -> None:
        """Lets a command pass; None: a person's, who needs no lease. Raises LeaderSuperseded."""
        if epoch is None:
            return
        if epoch < self.highest:
            raise LeaderSuperseded(f"epoch {epoch} is over: a scheduler leads with epoch {self.highest}")
        self.highest = epoch
