"""How many tokens will a prompt draw: the scheduler asks its predictor, and tells the decode instance."""

import msgspec

from common.ids import RequestId
from common.lengths import LengthDistribution


class PredictLength(msgspec.Struct, frozen=True, tag="predict-length"):
    """scheduler → predictor: how many tokens will this prompt draw? Answered by a PredictedLength."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    max_tokens: int


class PredictedLength(msgspec.Struct, frozen=True, tag="predicted"):
    """``lengths``: of the whole output, whatever of it has been drawn before."""

    lengths: LengthDistribution


class LengthPredicted(msgspec.Struct, frozen=True, tag="length-predicted"):
    """scheduler → decode: what the predictor says of a sequence that is yours, or is about to be. It takes
    the place of its task's ``lengths``."""

    request_id: RequestId
    attempt: int
    lengths: LengthDistribution
