"""The CSV files of Vidur's profiler, or of ours, as samples of each operator.

Files: ``mlp.csv`` (operators over tokens, by tensor parallelism), ``attention.csv``, and a node's
``all_reduce.csv`` and ``send_recv.csv``. ``lamella profile --operators`` writes the same columns, and what
Vidur's estimator leaves out: ``embedding`` over tokens, and in ``sequences.csv`` output matrix and sampling
over the sequences that get a token, with ``all_gather.csv`` for the parts of their logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import spec
from common.cost import ELEMENT_BYTES
from common.errors import ConfigError
from common.shapes import ModelShape
from services.simulator.performance.files import PerformanceFileError, Table, read_table
from services.simulator.performance.interface import HeldOutError
from services.simulator.performance.regression import FOLDS, Regression, Samples, held_out_errors

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
OPTIONAL_OPERATORS = ("input_layernorm", "attn_rope", "post_attention_layernorm", "add")
"""Not every model has them; where they are missing they take no time, as with theirs."""
EMBEDDING = "embedding"
"""Once a pass. Vidur's files have their own, ``emb``, which its estimator does not count."""
SEQUENCE_OPERATORS = ("output_matrix", "sampling")
KV_SAVE = "attn_kv_cache_save"
"""Not in profiles of 2024."""
TENSOR_PARALLEL = "num_tensor_parallel_workers"
DTYPE = "dtype"
"""Of activations, in our files alone: Vidur's are of fp16."""
ACTIVATION_BYTES: Mapping[str, int] = {str(name): size for name, size in spec.ELEMENT_BYTES.items()}
FP16_BYTES = ELEMENT_BYTES["fp16"]


@dataclass(frozen=True, slots=True)
class VidurFiles:
    """``all_reduce`` is needed where tensors are parallel, ``send_recv`` by a pipeline. ``sequences`` and
    ``all_gather`` are ours alone."""

    mlp: Path
    attention: Path
    all_reduce: Path | None = None
    send_recv: Path | None = None
    sequences: Path | None = None
    all_gather: Path | None = None


@dataclass(frozen=True, slots=True)
class VidurProfile:
    """What was measured for one model, device and tensor parallelism: ms, over tokens, or over a key and a
    context. ``transfer`` is needed by a pipeline only, ``reduction`` where tensors are parallel. Once a pass
    are ``embedding`` over tokens, ``sequences`` and ``gather`` over those that get a token; none: not
    counted."""

    shape: ModelShape
    tensor_parallel: int
    operators: tuple[Samples, ...]
    prefill: Samples
    decode: Samples
    reduction: Samples | None
    transfer: Samples | None
    embedding: Samples | None = None
    sequences: tuple[Samples, ...] = ()
    gather: Samples | None = None
    element_bytes: int = FP16_BYTES

    @property
    def samples(self) -> tuple[Samples, ...]:
        """Of every operator that was measured."""
        optional = (self.embedding, *self.sequences, self.reduction, self.gather, self.transfer)
        there = [each for each in optional if each is not None]
        return (*self.operators, self.prefill, self.decode, *there)

    def held_out(self, regression: Regression = "linear", folds: int = FOLDS) -> tuple[HeldOutError, ...]:
        """As ``samples`` are."""
        return held_out_errors(self.samples, regression, folds)


def read_vidur(
    files: VidurFiles,
    shape: ModelShape,
    tensor_parallel: int,
    *,
    is_pipeline_on_network: bool = False,
    are_messages_measured: bool = True,
) -> VidurProfile:
    """Raises PerformanceFileError, also where a file is another model's. ``is_pipeline_on_network``: stages
    are on nodes of their own. ``are_messages_measured`` False: no file of messages is read."""
    mlp = _token_table(files.mlp, shape, tensor_parallel)
    tokens = mlp.numbers("num_tokens", least=1)[:, None]
    operators = tuple(
        Samples(name, tokens, mlp.numbers(median_column(name), least=0))
        for name in TOKEN_OPERATORS
        if median_column(name) in mlp.columns
    )
    embedding = None
    if median_column(EMBEDDING) in mlp.columns:
        embedding = Samples(EMBEDDING, tokens, mlp.numbers(median_column(EMBEDDING), least=0))
    attention = _attention_table(files.attention, shape, tensor_parallel)
    saves = _kv_saves(attention)
    reduction = transfer = gather = None
    element_bytes = _element_bytes(mlp)
    row_bytes = element_bytes * shape.hidden_size
    is_parallel = are_messages_measured and tensor_parallel > 1
    if is_parallel:
        reduction = reduction_samples(files.all_reduce, row_bytes, tensor_parallel)
    if are_messages_measured and files.send_recv is not None:
        transfer = transfer_samples(files.send_recv, row_bytes, is_on_network=is_pipeline_on_network)
    sequences = _sequence_samples(files.sequences, shape, tensor_parallel)
    if is_parallel and sequences:
        part_bytes = element_bytes * -(-shape.vocab_size // tensor_parallel)
        gather = _collective(files.all_gather, "all_gather", part_bytes, tensor_parallel, tensor_parallel)
    prefill, decode = _prefill_samples(attention), _decode_samples(attention)
    return VidurProfile(
        shape,
        tensor_parallel,
        operators + saves,
        prefill,
        decode,
        reduction,
        transfer,
        embedding,
        sequences,
        gather,
        element_bytes,
    )


def files_in(directory: Path) -> VidurFiles:
    """Of ``lamella profile --operators``. It may have measured no messages."""

    def messages(name: str) -> Path | None:
        path = directory / f"{name}.csv"
        return path if path.is_file() else None

    return VidurFiles(
        directory / "mlp.csv",
        directory / "attention.csv",
        messages("all_reduce"),
        messages("send_recv"),
        directory / "sequences.csv",
        messages("all_gather"),
    )


def _token_table(path: Path, shape: ModelShape, tensor_parallel: int) -> Table:
    columns = [median_column(name) for name in TOKEN_OPERATORS if name not in OPTIONAL_OPERATORS]
    optional = [*map(median_column, OPTIONAL_OPERATORS), median_column(EMBEDDING), DTYPE]
    sizes = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")
    table = read_table(path, (*columns, *sizes, "num_tokens", TENSOR_PARALLEL), optional)
    widths = {**_widths(shape), "n_head": shape.heads, "n_expanded_embd": shape.intermediate_size}
    _check_model(table, widths, shape)
    return table.select(**{TENSOR_PARALLEL: float(tensor_parallel)})


def _attention_table(path: Path, shape: ModelShape, tensor_parallel: int) -> Table:
    times = (median_column("attn_prefill"), median_column("attn_decode"))
    sizes = ("n_embd", "n_q_head", "n_kv_head", TENSOR_PARALLEL)
    cases = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill")
    table = read_table(path, (*times, *sizes, *cases), (median_column(KV_SAVE),))
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
    values = rows.numbers(median_column("attn_prefill"), above=0)
    return Samples("attn_prefill", features, values, key_power=2.0)


def _decode_samples(attention: Table) -> Samples:
    rows = attention.select(is_prefill="False")
    features = np.column_stack((rows.numbers("batch_size", least=1), rows.numbers("kv_cache_size", least=0)))
    return Samples("attn_decode", features, rows.numbers(median_column("attn_decode"), above=0))


def _kv_saves(attention: Table) -> tuple[Samples, ...]:
    column = median_column(KV_SAVE)
    if column not in attention.columns:
        return ()
    tokens = np.maximum(
        attention.numbers("prefill_chunk_size", least=0), attention.numbers("batch_size", least=1)
    )
    return (Samples(KV_SAVE, tokens[:, None], attention.numbers(column, least=0)),)


def _sequence_samples(path: Path | None, shape: ModelShape, tensor_parallel: int) -> tuple[Samples, ...]:
    if path is None:
        return ()
    columns = [median_column(name) for name in SEQUENCE_OPERATORS]
    table = read_table(path, (*columns, "n_embd", "vocab_size", "num_sequences", TENSOR_PARALLEL))
    _check_model(table, {"n_embd": shape.hidden_size, "vocab_size": shape.vocab_size}, shape)
    chosen = table.select(**{TENSOR_PARALLEL: float(tensor_parallel)})
    sequences = chosen.numbers("num_sequences", least=1)[:, None]
    return tuple(
        Samples(name, sequences, chosen.numbers(median_column(name), least=0)) for name in SEQUENCE_OPERATORS
    )


def _element_bytes(table: Table) -> int:
    """Of activations: the same in all rows."""
    if DTYPE not in table.columns:
        return FP16_BYTES
    names = table.texts(DTYPE)
    for row, name in zip(table.rows, names, strict=True):
        if name not in ACTIVATION_BYTES or name != names[0]:
            rule = f"{name!r}: must be one of {', '.join(ACTIVATION_BYTES)}, the same in all rows"
            raise PerformanceFileError(table.path, f"column {DTYPE}, row {row}", rule)
    return ACTIVATION_BYTES[names[0]]


def reduction_samples(path: Path | None, row_bytes: int, tensor_parallel: int) -> Samples:
    """Over rows, all workers in one node. Raises ConfigError without a file."""
    return _collective(path, "all_reduce", row_bytes, tensor_parallel, tensor_parallel)


def transfer_samples(path: Path, row_bytes: int, *, is_on_network: bool) -> Samples:
    """Of a pipeline's stages, over rows."""
    return _collective(path, "send_recv", row_bytes, 2, 1 if is_on_network else 2)


def _collective(path: Path | None, name: str, row_bytes: int, workers: int, in_node: int) -> Samples:
    """Over rows: a message is ``row_bytes`` for each. ``in_node``: how many of the workers are in one."""
    if path is None:
        raise ConfigError(name, None, f"is needed for tensor parallelism over {workers}")
    table = read_table(path, (median_column(name), "size", "num_workers", "devices_per_node"))
    chosen = table.select(num_workers=float(workers)).select(devices_per_node=float(in_node))
    rows = chosen.numbers("size", above=0) / row_bytes
    return Samples(name, rows[:, None], chosen.numbers(median_column(name), least=0))


def median_column(operator: str) -> str:
    return f"time_stats.{operator}.median"
