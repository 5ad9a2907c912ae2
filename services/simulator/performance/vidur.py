"""Vidur's estimator (4.3, 4.4), trained from the CSV files of its profiler.

Files: ``mlp.csv`` (operators over tokens, by tensor parallelism), ``attention.csv``, and a node's
``all_reduce.csv`` and ``send_recv.csv``. Several chunks are one of as many squared tokens, with the context
of all; a decode batch is one of its mean context; where KV heads are shared, several at once take a tenth
longer. A layer is its attention, its feed-forward network, one addition, and with tensor parallelism two
reductions and their launches. Embedding and output matrix are not counted, nor the CPU's work, as in their
default.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.cost import ELEMENT_BYTES
from common.errors import ConfigError
from common.shapes import ModelShape
from services.simulator.performance.files import FloatArray, PerformanceFileError, Table, read_table
from services.simulator.performance.interface import HeldOutError
from services.simulator.performance.operators import Chunks
from services.simulator.performance.regression import (
    FOLDS,
    Regression,
    Regressor,
    Samples,
    fit,
    held_out_errors,
)
from services.simulator.performance.roofline import REDUCTIONS

TOKEN_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
OPTIONAL_OPERATORS = ("input_layernorm", "post_attention_layernorm", "add")
"""Not every model has them; where they are missing they take no time, as with theirs."""
KV_SAVE = "attn_kv_cache_save"
"""Not in profiles of 2024."""
TENSOR_PARALLEL = "num_tensor_parallel_workers"
MS = 1e-3
FP16_BYTES = ELEMENT_BYTES["fp16"]
ROW_TILE = 8
"""Look-ups are at the next multiple of so many tokens."""
LAUNCH_MS = 0.02
"""Of a reduction (nccl_cpu_launch_overhead_ms)."""
GROUPED_BATCH_FACTOR = 1.1
"""attention_prefill_batching_overhead_fraction and attention_decode_batching_overhead_fraction."""


@dataclass(frozen=True, slots=True)
class VidurFiles:
    """``all_reduce`` is needed where tensors are parallel, ``send_recv`` by a pipeline."""

    mlp: Path
    attention: Path
    all_reduce: Path | None = None
    send_recv: Path | None = None


@dataclass(frozen=True, slots=True)
class VidurProfile:
    """What was measured for one model, device and tensor parallelism: ms, over tokens, or over a key and a
    context. ``transfer`` is needed by a pipeline only, ``reduction`` where tensors are parallel."""

    shape: ModelShape
    tensor_parallel: int
    operators: tuple[Samples, ...]
    prefill: Samples
    decode: Samples
    reduction: Samples | None
    transfer: Samples | None

    def held_out(self, regression: Regression = "linear", folds: int = FOLDS) -> tuple[HeldOutError, ...]:
        optional = [each for each in (self.reduction, self.transfer) if each is not None]
        return held_out_errors((*self.operators, self.prefill, self.decode, *optional), regression, folds)


def read_vidur(
    files: VidurFiles, shape: ModelShape, tensor_parallel: int, *, is_pipeline_on_network: bool = False
) -> VidurProfile:
    """Raises PerformanceFileError, also where a file is another model's. ``is_pipeline_on_network``: stages
    are on nodes of their own."""
    mlp = _token_table(files.mlp, shape, tensor_parallel)
    tokens = mlp.numbers("num_tokens", least=1)[:, None]
    operators = tuple(
        Samples(name, tokens, mlp.numbers(_median(name), least=0))
        for name in TOKEN_OPERATORS
        if _median(name) in mlp.columns
    )
    attention = _attention_table(files.attention, shape, tensor_parallel)
    saves = _kv_saves(attention)
    reduction = transfer = None
    if tensor_parallel > 1:
        reduction = _collective(files.all_reduce, "all_reduce", shape, tensor_parallel, tensor_parallel)
    if files.send_recv is not None:
        transfer = _collective(files.send_recv, "send_recv", shape, 2, 1 if is_pipeline_on_network else 2)
    prefill, decode = _prefill_samples(attention), _decode_samples(attention)
    return VidurProfile(shape, tensor_parallel, operators + saves, prefill, decode, reduction, transfer)


class VidurOperators:
    """Fitted; an ``operators.Operators``. ``batch_factor``: see ``GROUPED_BATCH_FACTOR``; 1 to leave it
    out."""

    def __init__(
        self,
        profile: VidurProfile,
        *,
        pipeline_parallel: int = 1,
        regression: Regression = "linear",
        batch_factor: float = GROUPED_BATCH_FACTOR,
        launch_ms: float = LAUNCH_MS,
    ) -> None:
        """Raises ConfigError for a pipeline without ``send_recv``, or of other stages than divide the
        layers."""
        shape = profile.shape
        if shape.layers % pipeline_parallel:
            rule = f"must divide the {shape.layers} layers of {shape.name}"
            raise ConfigError("pipeline_parallel", pipeline_parallel, rule)
        if pipeline_parallel > 1 and profile.transfer is None:
            raise ConfigError("send_recv", None, "is needed for a pipeline of several stages")
        self._stages = pipeline_parallel
        self._layers = shape.layers
        self._launch_ms = launch_ms
        self._batch_factor = batch_factor if shape.kv_heads < shape.heads else 1.0
        self._operators = {samples.operator: fit(regression, samples) for samples in profile.operators}
        self._prefill = fit(regression, profile.prefill)
        self._decode = fit(regression, profile.decode)
        self._reduction = _fit_if(regression, profile.reduction)
        self._transfer = _fit_if(regression, profile.transfer)

    @property
    def stages(self) -> int:
        return self._stages

    def row_operators_s(self, rows: FloatArray) -> dict[str, FloatArray]:
        features, layers = rows[:, None], MS * self._layers

        def milliseconds(fitted: Regressor) -> FloatArray:
            return np.maximum(0.0, fitted.predict(features))

        found = {name: layers * milliseconds(each) for name, each in self._operators.items()}
        if self._reduction is not None:
            reduction_ms = milliseconds(self._reduction) + self._launch_ms
            found["all_reduce"] = layers * REDUCTIONS * reduction_ms
        if self._transfer is not None:
            found["send_recv"] = MS * (self._stages - 1) * milliseconds(self._transfer)
        return found

    def heads_s(self, rows: FloatArray) -> FloatArray:
        """Not counted."""
        return np.zeros(len(rows))

    def decode_attention_s(self, sequences: int, mean_contexts: FloatArray) -> FloatArray:
        features = np.column_stack((np.full(len(mean_contexts), float(sequences)), mean_contexts))
        factor = self._batch_factor if sequences > 1 else 1.0
        return MS * factor * self._layers * np.maximum(0.0, self._decode.predict(features))

    def equivalent_chunk(self, chunks: Chunks) -> tuple[float, float]:
        before = sum(each for each, _ in chunks)
        return before, math.sqrt(sum(tokens * tokens for _, tokens in chunks))

    def prefill_attention_s(self, before: FloatArray, tokens: FloatArray) -> FloatArray:
        features = np.column_stack((tokens, before))
        return MS * self._layers * np.maximum(0.0, self._prefill.predict(features))

    def prefill_factor(self, chunks: int) -> float:
        return self._batch_factor if chunks > 1 else 1.0


def _token_table(path: Path, shape: ModelShape, tensor_parallel: int) -> Table:
    columns = [_median(name) for name in TOKEN_OPERATORS if name not in OPTIONAL_OPERATORS]
    optional = [_median(name) for name in OPTIONAL_OPERATORS]
    sizes = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")
    table = read_table(path, (*columns, *sizes, "num_tokens", TENSOR_PARALLEL), optional)
    widths = {**_widths(shape), "n_head": shape.heads, "n_expanded_embd": shape.intermediate_size}
    _check_model(table, widths, shape)
    return table.select(**{TENSOR_PARALLEL: float(tensor_parallel)})


def _attention_table(path: Path, shape: ModelShape, tensor_parallel: int) -> Table:
    times = (_median("attn_prefill"), _median("attn_decode"))
    sizes = ("n_embd", "n_q_head", "n_kv_head", TENSOR_PARALLEL)
    cases = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    table = read_table(path, (*times, *sizes, *cases), (_median(KV_SAVE),))
    _check_model(table, {**_widths(shape), "n_q_head": shape.heads}, shape)
    return table.select(**{TENSOR_PARALLEL: float(tensor_parallel)})


def _widths(shape: ModelShape) -> dict[str, int]:
    return {"n_embd": shape.hidden_size, "n_kv_head": shape.kv_heads}


def _check_model(table: Table, expected: dict[str, int], shape: ModelShape) -> None:
    for column, value in expected.items():
        found = table.numbers(column)
        is_other = found != value
        if is_other.any():
            index = int(np.argmax(is_other))
            rule = f"{found[index]:g}: {shape.name} has {value}: another model's profile"
            raise PerformanceFileError(table.path, f"column {column}, row {table.rows[index]}", rule)


def _prefill_samples(attention: Table) -> Samples:
    rows = attention.select(is_prefill="True").select(batch_size=1.0)
    tokens = rows.numbers("prefill_chunk_size", least=1)
    features = np.column_stack((tokens, rows.numbers("kv_cache_size", least=0)))
    values = rows.numbers(_median("attn_prefill"), above=0)
    return Samples("attn_prefill", features, values, key_power=2.0)


def _decode_samples(attention: Table) -> Samples:
    rows = attention.select(is_prefill="False")
    features = np.column_stack((rows.numbers("batch_size", least=1), rows.numbers("kv_cache_size", least=0)))
    return Samples("attn_decode", features, rows.numbers(_median("attn_decode"), above=0))


def _kv_saves(attention: Table) -> tuple[Samples, ...]:
    column = _median(KV_SAVE)
    if column not in attention.columns:
        return ()
    tokens = np.maximum(
        attention.numbers("prefill_chunk_size", least=0), attention.numbers("batch_size", least=1)
    )
    return (Samples(KV_SAVE, tokens[:, None], attention.numbers(column, least=0)),)


def _collective(path: Path | None, name: str, shape: ModelShape, workers: int, in_node: int) -> Samples:
    """Over tokens: a message is each token's hidden state. ``in_node``: how many of the workers are in
    one."""
    if path is None:
        raise ConfigError(name, None, f"is needed for tensor parallelism over {workers}")
    table = read_table(path, (_median(name), "size", "num_workers", "devices_per_node"))
    chosen = table.select(num_workers=float(workers)).select(devices_per_node=float(in_node))
    tokens = chosen.numbers("size", above=0) / (FP16_BYTES * shape.hidden_size)
    return Samples(name, tokens[:, None], chosen.numbers(_median(name), least=0))


def _fit_if(regression: Regression, samples: Samples | None) -> Regressor | None:
    return None if samples is None else fit(regression, samples)


def _median(operator: str) -> str:
    return f"time_stats.{operator}.median"
