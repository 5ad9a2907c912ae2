"""A length predictor of a given accuracy, in the place of the live one: what a trained classifier is worth,
and what a better one would be (TetriInfer 3.3.2, 5.2.2).

It names the bucket that a request's length is in, or, as often as it is wrong, one beside it. Its answer says
so: a point for each of the three, in their middles. Whether it is wrong depends on the seed and the request
alone, so that every configuration hears the same of the same request.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.config import PredictorConfig
from common.errors import ConfigError
from common.ids import RequestId
from common.lengths import LengthDistribution, capped
from common.messages import GenerationRequest

DRAW_BYTES = 8


class PredictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``accuracy``: how often the right bucket of ``granularity`` tokens is named. ``delay_s``: from a
    request's placement until the answer is known."""

    accuracy: float = 1.0
    granularity: int = 1
    delay_s: float = 0.0


def check_prediction(prediction: PredictionConfig, predictor: PredictorConfig) -> None:
    """Raises ConfigError."""
    if predictor.kind != "none":
        raise ConfigError("predictor.kind", predictor.kind, "must be left out with [prediction]")
    if not 0 <= prediction.accuracy <= 1:
        raise ConfigError("prediction.accuracy", prediction.accuracy, "must be from 0 to 1")
    if prediction.granularity < 1:
        raise ConfigError("prediction.granularity", prediction.granularity, "must be at least 1")
    if not 0 <= prediction.delay_s <= predictor.timeout_s:
        rule = f"must be from 0 to predictor.timeout_s = {predictor.timeout_s:g}: nobody waits longer"
        raise ConfigError("prediction.delay_s", prediction.delay_s, rule)


@dataclass(frozen=True, slots=True)
class InaccuratePredictor:
    """``length_of``: how many tokens a request is going to draw."""

    config: PredictionConfig
    seed: int
    length_of: Callable[[GenerationRequest], int]

    def predict(self, request: GenerationRequest) -> LengthDistribution:
        named = self.name_bucket(request.request_id, self.length_of(request))
        return capped(self._answer(named), request.sampling.max_tokens)

    def name_bucket(self, request_id: RequestId, length: int) -> int:
        bucket = length // self.config.granularity
        chance, side = _draws(self.seed, request_id)
        if chance < self.config.accuracy:
            return bucket
        return bucket - 1 if bucket > 0 and side < 0.5 else bucket + 1

    def _answer(self, named: int) -> LengthDistribution:
        """How likely the true one is each, where one is as common as another."""
        right = self.config.accuracy
        beside = [bucket for bucket in (named - 1, named + 1) if bucket >= 0]
        shares = {bucket: (1 - right) / len(beside) for bucket in beside} | {named: right}
        points = ((self._middle(bucket), share) for bucket, share in sorted(shares.items()) if share > 0)
        return LengthDistribution(tuple(points))

    def _middle(self, bucket: int) -> float:
        return max(1.0, bucket * self.config.granularity + (self.config.granularity - 1) / 2)


def _draws(seed: int, request_id: RequestId) -> tuple[float, float]:
    """Two, each from 0 to under 1."""
    digest = hashlib.blake2b(f"{seed} {request_id}".encode(), digest_size=2 * DRAW_BYTES).digest()
    parts = digest[:DRAW_BYTES], digest[DRAW_BYTES:]
    first, second = (math.ldexp(int.from_bytes(part) >> 11, -53) for part in parts)
    return first, second
