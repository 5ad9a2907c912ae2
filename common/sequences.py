"""What both rooms must agree on about one sequence: when it ends, and how it goes on elsewhere."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from common.ids import GatewayId, InstanceId
from common.messages import ErrorReply, FinishReason, GenerationRequest, SampledToken, SequenceFailed


@dataclass(frozen=True, slots=True)
class PublishFailure:
    """A room's command: the gateway is to hear that the sequence goes no further there."""

    gateway_id: GatewayId
    failure: SequenceFailed


def failure_of(
    request: GenerationRequest,
    error: ErrorReply,
    *,
    can_continue: bool,
    lost_instance: InstanceId | None = None,
) -> PublishFailure:
    """``can_continue``: the sequence is sound, and may go on elsewhere. ``lost_instance`` does not answer."""
    return PublishFailure(
        request.gateway_id,
        SequenceFailed(request.request_id, request.attempt, error, can_continue, lost_instance),
    )


def finish_reason_of(
    request: GenerationRequest, index: int, token: SampledToken, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Whether the token at output position ``index`` ends the sequence, and why.

    ``min_tokens`` needs no rule here: sampling forbids the ending tokens until then.
    """
    sampling = request.sampling
    if token.token_id in sampling.stop_token_ids:
        return "stop"
    if not sampling.ignore_eos and token.token_id in eos_token_ids:
        return "stop"
    if index + 1 >= sampling.max_tokens:
        return "length"
    return None


def without_last_token(request: GenerationRequest) -> tuple[GenerationRequest, int]:
    """The request as it was before its last output token, and that one."""
    *before, last = request.output_ids
    return msgspec.structs.replace(request, output_ids=tuple(before)), last


def continued_with(request: GenerationRequest, token_id: int) -> GenerationRequest:
    """The request as the next instance continues it: with one more output token."""
    return msgspec.structs.replace(request, output_ids=(*request.output_ids, token_id))
