"""Requests as the tests of several rooms need them."""

from common.ids import GatewayId, RequestId
from common.messages import GenerationRequest, SamplingParams

GATEWAY = GatewayId("gateway-a")


def make_request(
    request_id: str = "r1",
    prompt_tokens: int = 4,
    max_tokens: int = 8,
    *,
    attempt: int = 0,
    gateway_id: GatewayId = GATEWAY,
    output_ids: tuple[int, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    head_start_s: float = 0.0,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(request_id),
        gateway_id=gateway_id,
        prompt_ids=tuple(range(100, 100 + prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
        output_ids=output_ids,
        attempt=attempt,
        head_start_s=head_start_s,
    )
