"""A sequence as the prefill room keeps it, and how its gateway hears that it goes no further here."""

from dataclasses import dataclass

from common.ids import Incarnation, InstanceId
from common.kv.blocks import BlockOwner
from common.lifecycle import PrefillPhase
from common.messages import ErrorReply, GenerationRequest, SequenceFailed
from prefill.events import PublishFailure
from prefill.handover import HandOver

ROOM = "prefill"


@dataclass(slots=True)
class PrefillSequence:
    """``is_offered``: the decode instance was told of it, and has not refused it."""

    owner: BlockOwner
    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    arrived_s: float
    hand_over: HandOver
    phase: PrefillPhase = PrefillPhase.QUEUED
    started_s: float = 0.0
    computed_tokens: int = 0
    first_token: int | None = None
    is_offered: bool = False
    is_cancelled: bool = False

    @property
    def remaining_tokens(self) -> int:
        return self.request.tokens - self.computed_tokens


def failure_of(
    sequence: PrefillSequence,
    error: ErrorReply,
    *,
    can_continue: bool,
    lost_instance: InstanceId | None = None,
) -> PublishFailure:
    request = sequence.request
    return PublishFailure(
        request.gateway_id,
        SequenceFailed(request.request_id, request.attempt, error, can_continue, lost_instance),
    )
