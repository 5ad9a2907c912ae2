"""What the two rooms of an instance let each other know: they share its engine's passes and its pool.

Like the pool's allocator it is one value that both states hold. Each writes what is its own after every
event.
"""

from dataclasses import dataclass

from common.config import MixedPolicy


@dataclass(slots=True)
class RoomMates:
    """``decoding``: sequences in the batch, each of which takes a token of a pass. ``policy``: who goes first
    (``scheduler.policy.mixed_batching``)."""

    policy: MixedPolicy = "chunked"
    decoding: int = 0
