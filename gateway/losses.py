"""Which instances, schedulers and gateways are said to be gone, and which sequences need them.

Pure but for being told the time. Word of a loss and word of a placement come from different sides, so each
may overtake the other: what is gone is remembered for as long as a placement from before it may be told.
"""

import math
from dataclasses import dataclass, field

from common.ids import Incarnation
from common.messages import InstanceGone, InstanceLife, Placement

GONE_MEMORY_S = 60.0
"""Longer than any submission takes."""
DECLARED_WITHIN_S = 1.0
"""Until everybody has heard that this gateway is gone, after it has itself: an instance that hears it late
forgets, too, what began meanwhile."""


@dataclass(slots=True)
class Losses:
    """``lease_s``: for how long word of one scheduler's silence may come, from each of the others.

    ``instances_s``: when incarnations left; ``schedulers_s``: when schedulers fell silent;
    ``declared_gone_s``: when this gateway was said to have left, though it lives.
    """

    lease_s: float
    instances_s: dict[InstanceGone, float] = field(default_factory=dict)
    schedulers_s: dict[Incarnation, float] = field(default_factory=dict)
    declared_gone_s: float = -math.inf

    def note_instance(self, gone: InstanceGone, now: float) -> None:
        known_s = self.instances_s
        kept = {each: gone_s for each, gone_s in known_s.items() if now - gone_s < GONE_MEMORY_S}
        self.instances_s = {**kept, gone: now}

    def note_scheduler(self, incarnation: Incarnation, now: float) -> bool:
        """Whether that is news. Each of the others says that it is gone; a lease later it is another
        silence."""
        known_s = self.schedulers_s
        self.schedulers_s = {each: gone_s for each, gone_s in known_s.items() if now - gone_s < self.lease_s}
        if incarnation in self.schedulers_s:
            return False
        self.schedulers_s[incarnation] = now
        return True

    def is_forgotten(self, started_s: float, now: float) -> bool:
        """Whether an attempt that was asked for at ``started_s`` is, because this gateway was declared gone;
        or may be, of those that began before everybody had heard. Of these it is said once all have."""
        heard_s = self.declared_gone_s + DECLARED_WITHIN_S
        return started_s <= self.declared_gone_s or started_s < heard_s <= now

    def find_lost(self, placement: Placement, attempt_tokens: int, since_s: float) -> InstanceGone | None:
        """Where word that a needed instance of the placement left came before that of the placement."""
        for gone, gone_s in self.instances_s.items():
            if gone_s >= since_s and is_needed(placement, attempt_tokens, gone):
                return gone
        return None


def is_needed(placement: Placement, attempt_tokens: int, gone: InstanceGone) -> bool:
    """Once a second token came, decode holds the KV and the prefill instance is not needed any more."""
    prefill = InstanceGone(placement.prefill_instance, placement.prefill_incarnation)
    return gone == _decode_life(placement) or (attempt_tokens < 2 and gone == prefill)


def find_former(placement: Placement, attempt_tokens: int, gone: InstanceGone) -> InstanceLife | None:
    """The lost life, if it drew a token of this attempt: its attention workers may have kept the KV. The
    first token is prefill's, if it takes part."""
    is_resumed = placement.prefill_instance == placement.decode_instance
    has_decoded = attempt_tokens >= (1 if is_resumed else 2)
    if has_decoded and gone == _decode_life(placement):
        return InstanceLife(gone.instance_id, gone.incarnation)
    return None


def _decode_life(placement: Placement) -> InstanceGone:
    return InstanceGone(placement.decode_instance, placement.decode_incarnation)
