"""A sequence as the prefill room keeps it."""

from dataclasses import dataclass, field

from common.ids import Incarnation, InstanceId
from common.kv.blocks import BlockOwner
from common.length_points import coming_tokens
from common.lengths import LengthDistribution
from common.lifecycle import PrefillPhase
from common.messages import GenerationRequest
from prefill.handover import HandOver

ROOM = "prefill"
KEPT_ROOM = "kept"
"""Of blocks that this room has given up and decode has yet to take: it does so before the next event."""


@dataclass(slots=True)
class PrefillSequence:
    """``is_offered``: the decode instance was told of it, and has not refused it.
    ``is_seeking``: another one is looked for; ``refusals``: how often that was needed.
    ``lengths``: what it is told of how long the sequence will get.
    ``computed_s``: when its KV was complete. ``is_moving``: it ran in this instance's decode room.
    ``is_bound_late``: whether it had better be decoded elsewhere than by ``decode_instance`` is still to be
    asked. ``tokens``: of its whole prompt."""

    owner: BlockOwner
    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    arrived_s: float
    hand_over: HandOver
    lengths: LengthDistribution | None = None
    phase: PrefillPhase = PrefillPhase.QUEUED
    started_s: float = 0.0
    computed_s: float | None = None
    computed_tokens: int = 0
    first_token: int | None = None
    is_offered: bool = False
    is_seeking: bool = False
    refusals: int = 0
    is_cancelled: bool = False
    is_moving: bool = False
    is_bound_late: bool = False
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens

    @property
    def coming_tokens(self) -> int:
        """That it is expected to draw."""
        lengths, request = self.lengths, self.request
        points = None if lengths is None else lengths.points
        return coming_tokens(points, len(request.output_ids), request.sampling.max_tokens)

    @property
    def remaining_tokens(self) -> int:
        return self.tokens - self.computed_tokens
