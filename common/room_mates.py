"""What the two rooms of an instance let each other know: they share its engine's passes and its pool.

Like the pool's allocator it is one value that both states hold. Each writes what is its own after every
event.
"""

from dataclasses import dataclass

from common.config import MixedPolicy
from common.kv.blocks import BlockOwner


@dataclass(slots=True)
class RoomMates:
    """``decoding``: sequences in the batch, or in one of those that take turns, each of which takes a token
    of a pass. ``policy``: who goes first (``scheduler.policy.mixed_batching``).

    ``wanted_blocks``: of the prompt whose turn it is, where there is not room for it; on a mixed instance
    (``is_mixed``) decodes give way to it. ``away_blocks``: that let the first sequence in which waits for
    memory to be decoded, and ``away_since_s``: since when it is the first. From ``max_wait_s`` on prompts
    leave it those; before, it leaves the prompt what that wants. ``stuck_since_s``: since when all that
    are to be decoded here wait for memory; None: somebody gets on.
    """

    policy: MixedPolicy = "chunked"
    max_wait_s: float = 1.0
    is_mixed: bool = False
    decoding: int = 0
    wanted_blocks: int = 0
    away_blocks: int = 0
    away_since_s: float = 0.0
    stuck_since_s: float | None = None
    _away: BlockOwner | None = None

    def note_away(self, owner: BlockOwner | None, blocks: int, now: float) -> None:
        """None: nobody waits for memory to be decoded."""
        if owner != self._away:
            self._away, self.away_since_s = owner, now
        self.away_blocks = blocks

    def note_stuck(self, *, is_stuck: bool, now: float) -> None:
        if not is_stuck:
            self.stuck_since_s = None
        elif self.stuck_since_s is None:
            self.stuck_since_s = now

    def owed_blocks(self, now: float) -> int:
        """That no prompt may take."""
        return self.away_blocks if now - self.away_since_s >= self.max_wait_s else 0

    def reserved_blocks(self, now: float) -> int:
        """That no sequence may take which is to be decoded beside others: whoever gave way to a prompt would
        be back before it."""
        return 0 if self.owed_blocks(now) else self.wanted_blocks
