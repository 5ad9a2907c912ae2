"""One sequence to generate, and what is drawn for it: the words that every service passes on."""

from typing import Literal

import msgspec

from common.ids import GatewayId, RequestId

FinishReason = Literal["stop", "length"]
"""Why a sequence ended by itself: an end-of-sequence or stop token, or its ``max_tokens``."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 is off. ``logprobs`` is the number of alternatives reported
    beside the chosen token's own log-probability; None reports nothing. The draw at output position p
    depends on ``(seed, p)`` alone, so a sequence continued elsewhere draws the same tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, complete enough to be started, or continued, anywhere.

    ``output_ids`` are tokens that the client already has: empty at first, filled when the sequence is
    continued after a preemption or the loss of an instance. ``attempt`` counts those continuations;
    whoever holds a lower attempt of the same request is superseded. ``service_class`` names what was promised
    (``common.service_classes``); where prompts queue it counts as ``head_start_s`` older than it is.
    ``traceparent``: the W3C name of the span of its gateway, None where it is not traced (``common.spans``).
    """

    request_id: RequestId
    gateway_id: GatewayId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    attempt: int = 0
    service_class: str = "default"
    head_start_s: float = 0.0
    traceparent: str | None = None

    def __repr__(self) -> str:
        """Without what was asked and answered, as errors and logs quote what they are about."""
        return (
            f"GenerationRequest({self.request_id!r}, attempt={self.attempt},"
            f" prompt_tokens={len(self.prompt_ids)}, output_tokens={len(self.output_ids)})"
        )

    @property
    def tokens(self) -> int:
        """Tokens whose KV must exist before the next one can be drawn."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """The longest the sequence can get: prompt and every output token."""
        return len(self.prompt_ids) + self.sampling.max_tokens


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A drawn token. ``logprob`` and ``top`` (id, logprob) are there when the request asked."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
