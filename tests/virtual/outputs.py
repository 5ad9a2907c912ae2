"""What requests of a virtual mesh draw: the emulated engine defines it, whoever computes it."""

from collections.abc import Callable

from common.config import EmulationConfig
from common.emulation import EmulatedRunner
from common.ids import RequestId
from common.lengths import LengthDistribution, certain
from common.messages import GenerationRequest, SamplingParams
from common.sequences import finish_reason_of
from common.steps import Draw, SequenceStep
from tests.requests import GATEWAY

EOS_TOKEN_IDS = (3,)
RUNNER = EmulatedRunner(EmulationConfig(vocab_size=61), wait=lambda _: None)


def sequence_of(name: str, prompt_tokens: int, max_tokens: int, seed: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(name),
        gateway_id=GATEWAY,
        prompt_ids=tuple(range(prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
    )


def expected_tokens(request: GenerationRequest) -> tuple[list[int], str]:
    """What the emulated engine defines for the request, drawn one after another by nobody's state."""
    output_ids: list[int] = []
    while True:
        draw = Draw(request.sampling, request.prompt_ids, output_ids)
        [token] = RUNNER.run([SequenceStep((0,), 0, (), draw)])
        assert token is not None
        finish = finish_reason_of(request, len(output_ids), token, EOS_TOKEN_IDS)
        output_ids.append(token.token_id)
        if finish is not None:
            return output_ids, finish


def _predict_wrongly(request: GenerationRequest) -> LengthDistribution:
    """Far too little of some, far too much of others."""
    return certain(1 if request.sampling.seed % 2 else 10 * request.sampling.max_tokens)


PREDICTORS: dict[str, Callable[[GenerationRequest], LengthDistribution] | None] = {
    "none": None,
    "right": lambda request: certain(len(expected_tokens(request)[0])),
    "wrong": _predict_wrongly,
}
