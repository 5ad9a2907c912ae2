"""DistServe's linear latency constants, from its simulator's JSON files (ms).

A stage of a prefill batch takes (a + b ΣL + c ΣL²)/PP + PP, of a decode step (a + b Σcontext + c B)/PP, with
constants of their own for large batches. Their first stage also pays for Ray, as their engine did; that is an
option. Both of one pass they never measured: the sum, with the fixed part of the prompts alone.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from common.errors import ConfigError, reason_of
from services.simulator.performance.files import PerformanceFileError
from services.simulator.shape import PassShape, attended_tokens

MS = 1e-3
STAGE_MS = 1.0
"""Of a prefill's stage, times the stages."""
RAY_MS, RAY_TOKEN_MS = 2.0, 1e-4
NAMED_CHOICES = 12

Constants = tuple[float, float, float]


class DistServeConstants(msgspec.Struct, frozen=True, kw_only=True):
    """One model's at one tensor parallelism. One published quadratic coefficient is negative: vLLM's
    noise."""

    prefill: Constants
    decoding_smallbs: Constants
    decoding_largebs: Constants
    decoding_large_small_bs_threshold: Annotated[int, msgspec.Meta(ge=1)]


def read_distserve(path: Path, model: str, tensor_parallel: int) -> DistServeConstants:
    """Raises PerformanceFileError, also where nothing of this model and parallelism is in it."""
    try:
        models = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, msgspec.Raw]])
    except (OSError, msgspec.DecodeError) as exc:
        raise PerformanceFileError(path, "", f"cannot be read: {reason_of(exc)}") from exc
    if model not in models:
        known = ", ".join(sorted(models)[:NAMED_CHOICES])
        raise PerformanceFileError(path, f"key {model}", f"is missing; has {known}")
    by_degree = models[model]
    key = str(tensor_parallel)
    if key not in by_degree:
        known = ", ".join(sorted(by_degree, key=str))
        raise PerformanceFileError(path, f"key {model}.{key}", f"is missing; has tensor parallelism {known}")
    try:
        return msgspec.json.decode(by_degree[key], type=DistServeConstants)
    except msgspec.DecodeError as exc:
        raise PerformanceFileError(path, f"key {model}.{key}", str(exc)) from exc


class DistServeModel:
    def __init__(
        self, constants: DistServeConstants, *, pipeline_parallel: int = 1, is_ray_counted: bool = False
    ) -> None:
        if pipeline_parallel < 1:
            raise ConfigError("pipeline_parallel", pipeline_parallel, "must be at least 1")
        self.stages = pipeline_parallel
        self._constants = constants
        self._ray = (RAY_MS, RAY_TOKEN_MS) if is_ray_counted else (0.0, 0.0)

    def pass_s(self, shape: PassShape) -> float:
        fixed, per_token, per_square = self._constants.prefill
        total_ms = 0.0
        if shape.chunks:
            tokens = squares = 0
            for before, some in shape.chunks:
                tokens += some
                squares += (before + some) ** 2 - before**2
            total_ms = max(0.0, fixed + per_token * tokens + per_square * squares)
            total_ms += STAGE_MS * self.stages**2
            total_ms += self._ray[0] + self._ray[1] * tokens
        if shape.sequences:
            step_fixed, per_context, per_sequence = self._step_constants(shape.sequences)
            total_ms += per_context * shape.context_tokens + per_sequence * shape.sequences
            total_ms += self._ray[1] * shape.context_tokens
            if not shape.chunks:
                total_ms += step_fixed + self._ray[0]
        return MS * total_ms

    def front_s(self, shape: PassShape) -> float:
        """Ray's."""
        fixed_ms, per_token_ms = self._ray
        return MS * (fixed_ms + per_token_ms * (shape.chunk_tokens + shape.context_tokens))

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        fixed, per_context, per_sequence = self._step_constants(sequences)
        contexts = attended_tokens(sequences, context_tokens, steps)
        each_ms = fixed + per_sequence * sequences + self._ray[0]
        return MS * (steps * each_ms + (per_context + self._ray[1]) * contexts)

    def _step_constants(self, sequences: int) -> Constants:
        if sequences < self._constants.decoding_large_small_bs_threshold:
            return self._constants.decoding_smallbs
        return self._constants.decoding_largebs
