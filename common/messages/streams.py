"""What instances publish to the gateway whose requests they work on."""

import msgspec

from common.ids import InstanceId, RequestId
from common.messages.placement import Placement
from common.messages.replies import ErrorReply
from common.messages.requests import FinishReason, SampledToken


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one sequence. ``index`` counts output tokens from 0 and is how gaps are seen."""

    request_id: RequestId
    attempt: int
    index: int
    token: SampledToken
    finish_reason: FinishReason | None = None


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    """instance → gateway: the tokens of one step that belong to this gateway's requests."""

    instance_id: InstanceId
    tokens: tuple[TokenEvent, ...]


class SequenceFailed(msgspec.Struct, frozen=True, tag="failed"):
    """instance → gateway: this attempt ended without finishing. The gateway may continue it elsewhere when
    ``can_continue`` (preempted, hand-over failed, instance draining). ``lost_instance`` did not answer."""

    request_id: RequestId
    attempt: int
    error: ErrorReply
    can_continue: bool
    lost_instance: InstanceId | None = None


class SequenceMoved(msgspec.Struct, frozen=True, tag="moved"):
    """instance → gateway: this attempt goes on at another instance, with its KV and its ``output_tokens``.
    ``placement.prefill_instance``, which says so, is needed until the next token comes."""

    request_id: RequestId
    attempt: int
    placement: Placement
    output_tokens: int
