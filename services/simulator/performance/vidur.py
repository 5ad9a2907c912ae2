"""Vidur's estimator (4.3, 4.4), trained from its profiler's files, or from ours.

Several chunks are one of as many squared tokens, with the context of all; a decode batch is one of its mean
context; where KV heads are shared, several at once take a tenth longer. A layer is its attention, its
feed-forward network, one addition, and with tensor parallelism two reductions and their launches. Embedding
and output matrix count where they were measured, as ours are; the CPU's work does not, as in their default.
"""

import math
from collections.abc import Mapping

import numpy as np

from common.devices import DeviceSpec
from common.errors import ConfigError
from services.simulator.performance.files import FloatArray
from services.simulator.performance.operators import Chunks
from services.simulator.performance.regression import Regression, Regressor, Samples, fit
from services.simulator.performance.roofline import (
    REDUCTIONS,
    Line,
    Parallelism,
    reductions_s,
    transfers_s,
)
from services.simulator.performance.vidur_files import EMBEDDING, VidurProfile

MS = 1e-3
ROW_TILE = 8
"""Look-ups are at the next multiple of so many tokens."""
LAUNCH_MS = 0.02
"""Of a reduction (nccl_cpu_launch_overhead_ms)."""
GROUPED_BATCH_FACTOR = 1.1
"""attention_prefill_batching_overhead_fraction and attention_decode_batching_overhead_fraction."""


Links = Mapping[str, Line]
"""Seconds of a pass's messages that were not measured: (of none, of each token) by operator."""


class VidurOperators:
    """Fitted; an ``operators.Operators``. ``batch_factor``: see ``GROUPED_BATCH_FACTOR``; 1 to leave it
    out. ``launch_ms``: of a reduction, where its samples leave that out. Chunks that are one have the context
    of all where ``are_contexts_summed``, as theirs, else as many pairs of a token and one before it."""

    def __init__(
        self,
        profile: VidurProfile,
        *,
        pipeline_parallel: int = 1,
        regression: Regression = "linear",
        batch_factor: float = GROUPED_BATCH_FACTOR,
        launch_ms: float = LAUNCH_MS,
        are_contexts_summed: bool = True,
        links: Links | None = None,
    ) -> None:
        """``links``: in place of messages that were not measured. Raises ConfigError for a pipeline without
        ``send_recv``, or of other stages than divide the layers."""
        shape = profile.shape
        if shape.layers % pipeline_parallel:
            rule = f"must divide the {shape.layers} layers of {shape.name}"
            raise ConfigError("pipeline_parallel", pipeline_parallel, rule)
        if pipeline_parallel > 1 and profile.transfer is None and links is None:
            raise ConfigError("send_recv", None, "is needed for a pipeline of several stages")
        self._stages = pipeline_parallel
        self._layers = shape.layers
        self._launch_ms = launch_ms
        self._batch_factor = batch_factor if shape.kv_heads < shape.heads else 1.0
        self._are_contexts_summed = are_contexts_summed
        self._links = links
        self._operators = {samples.operator: fit(regression, samples) for samples in profile.operators}
        self._prefill = fit(regression, profile.prefill)
        self._decode = fit(regression, profile.decode)
        self._reduction = _fit_if(regression, profile.reduction)
        self._transfer = _fit_if(regression, profile.transfer)
        self._embedding = _fit_if(regression, profile.embedding)
        at_end = (*profile.sequences, *([] if profile.gather is None else [profile.gather]))
        self._at_end = [fit(regression, samples) for samples in at_end]

    @property
    def stages(self) -> int:
        return self._stages

    def row_operators_s(self, rows: FloatArray) -> dict[str, FloatArray]:
        features, layers = rows[:, None], MS * self._layers

        def milliseconds(fitted: Regressor) -> FloatArray:
            return np.maximum(0.0, fitted.predict(features))

        found = {name: layers * milliseconds(each) for name, each in self._operators.items()}
        if self._embedding is not None:
            found[EMBEDDING] = MS * milliseconds(self._embedding)
        if self._reduction is not None:
            reduction_ms = milliseconds(self._reduction) + self._launch_ms
            found["all_reduce"] = layers * REDUCTIONS * reduction_ms
        if self._transfer is not None and self._stages > 1:
            found["send_recv"] = MS * (self._stages - 1) * milliseconds(self._transfer)
        if self._links is not None:
            for name, (fixed_s, each_s) in self._links.items():
                found[name] = fixed_s + rows * each_s
        return found

    def heads_s(self, rows: FloatArray) -> FloatArray:
        """With the draw; a pass in which nobody gets a token ends without."""
        each = (np.maximum(0.0, fitted.predict(rows[:, None])) for fitted in self._at_end)
        return np.where(rows > 0, MS * sum(each, np.zeros(len(rows))), 0.0)

    def decode_attention_s(self, sequences: int, mean_contexts: FloatArray) -> FloatArray:
        features = np.column_stack((np.full(len(mean_contexts), float(sequences)), mean_contexts))
        factor = self._batch_factor if sequences > 1 else 1.0
        return MS * factor * self._layers * np.maximum(0.0, self._decode.predict(features))

    def equivalent_chunk(self, chunks: Chunks) -> tuple[float, float]:
        tokens = math.sqrt(sum(each * each for _, each in chunks))
        if self._are_contexts_summed:
            return sum(before for before, _ in chunks), tokens
        return sum(before * each for before, each in chunks) / tokens, tokens

    def prefill_attention_s(self, before: FloatArray, tokens: FloatArray) -> FloatArray:
        features = np.column_stack((tokens, before))
        return MS * self._layers * np.maximum(0.0, self._prefill.predict(features))

    def prefill_factor(self, chunks: int) -> float:
        return self._batch_factor if chunks > 1 else 1.0


def links_of(profile: VidurProfile, device: DeviceSpec, parallelism: Parallelism) -> Links:
    """As the roofline has them."""
    shape, element_bytes = profile.shape, profile.element_bytes
    lines = {
        "all_reduce": reductions_s(shape, device, parallelism, element_bytes),
        "send_recv": transfers_s(shape, device, parallelism, element_bytes),
    }
    return {name: line for name, line in lines.items() if any(line)}


def _fit_if(regression: Regression, samples: Samples | None) -> Regressor | None:
    return None if samples is None else fit(regression, samples)
