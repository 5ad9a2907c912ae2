"""NVIDIA's aiconfigurator: measured kernels of many sizes, put together to any dense model.

A directory of its tables (``*_gemm_perf.csv``, ``*_context_attention_perf.csv``,
``*_generation_attention_perf.csv``, ``*_custom_allreduce_perf.csv``, each plain or gzipped) is one device and
engine. A layer is its four matrices' products, its attention, two reductions where tensors are parallel, and
what moves through memory between them (norms, additions, activation, rotation), at the device's bandwidth.
Reductions are those of its own system, and a pipeline's transfers go at the catalogue's links, unless files
of another node's links are named, which Vidur's profiler wrote.
Attention over tokens before a chunk was not measured: it takes the share of the whole's squared tokens, as
theirs does. Work is (sequence, KV head): where a device's heads were not measured, fewer heads of a batch as
many times larger stand for them.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.cost import ELEMENT_BYTES
from common.devices import DeviceSpec
from common.shapes import ModelShape
from services.simulator.performance.files import FloatArray, PerformanceFileError, Table, read_table
from services.simulator.performance.interface import HeldOutError
from services.simulator.performance.operators import Chunks
from services.simulator.performance.regression import (
    FOLDS,
    Regression,
    Samples,
    fit,
    held_out_errors,
)
from services.simulator.performance.roofline import (
    REDUCTIONS,
    Parallelism,
    check_parallelism,
    transfers_s,
    usual_utilisation,
)
from services.simulator.performance.vidur import LAUNCH_MS
from services.simulator.performance.vidur_files import reduction_samples, transfer_samples

MS = 1e-3
DTYPE = "bfloat16"
BF16_BYTES = ELEMENT_BYTES["bf16"]
GRAPH_BACKEND = "vllm_graph"
FULL_WINDOW = 0.0
ATTENTION_COLUMNS = (
    "batch_size",
    "isl",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "attn_dtype",
    "kv_cache_dtype",
    "step",
    "latency",
)
ROUND_TRIPS = 8
"""Hidden states that a layer's norms, additions and rotation read and write: each norm and each addition
reads one or two and writes one, and rotation about as many again."""


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """Vidur's files of a node, each in place of what counts else."""

    all_reduce: Path | None = None
    send_recv: Path | None = None


OWN_LINKS = NodeLinks()


@dataclass(frozen=True, slots=True)
class KernelTables:
    """What is measured of one device, for one model's heads on it, and between several. ms."""

    products: Table
    prefill: Samples
    decode: Samples
    merged: int
    """How many times a batch is taken, with as many times fewer heads."""
    reduction: Samples | None
    transfer: Samples | None = None

    def held_out(self, regression: Regression = "linear", folds: int = FOLDS) -> tuple[HeldOutError, ...]:
        between = [each for each in (self.reduction, self.transfer) if each is not None]
        return held_out_errors([self.prefill, self.decode, *between], regression, folds)


def read_kernels(
    directory: Path,
    shape: ModelShape,
    tensor_parallel: int,
    links: NodeLinks = OWN_LINKS,
    *,
    is_pipeline_on_network: bool = False,
) -> KernelTables:
    """Raises PerformanceFileError where a table is missing or has nothing for these heads."""
    check_parallelism(shape, tensor_parallel, 1)
    heads, kv_heads = shape.heads // tensor_parallel, max(1, shape.kv_heads // tensor_parallel)
    products = read_table(_find(directory, "gemm_perf"), ("gemm_dtype", "m", "n", "k", "latency"))
    context = _attention(_find(directory, "context_attention_perf"), shape.head_dim)
    generation = _attention(_find(directory, "generation_attention_perf"), shape.head_dim)
    merged = _merging(generation, heads, kv_heads)
    row_bytes = BF16_BYTES * shape.hidden_size
    reduction = transfer = None
    if tensor_parallel > 1:
        reduction = _reductions(directory, row_bytes, tensor_parallel, links.all_reduce)
    if links.send_recv is not None:
        transfer = transfer_samples(links.send_recv, row_bytes, is_on_network=is_pipeline_on_network)
    return KernelTables(
        products=products.select(gemm_dtype=DTYPE),
        prefill=_prefill_samples(context, heads, kv_heads),
        decode=_decode_samples(generation, heads // merged, kv_heads // merged),
        merged=merged,
        reduction=reduction,
        transfer=transfer,
    )


class KernelOperators:
    """An ``operators.Operators`` from a device's tables."""

    def __init__(
        self,
        tables: KernelTables,
        shape: ModelShape,
        device: DeviceSpec,
        *,
        parallelism: Parallelism,
        regression: Regression = "linear",
    ) -> None:
        """Raises PerformanceFileError where the tables have no products near the model's."""
        check_parallelism(shape, parallelism.tensor, parallelism.pipeline)
        tensor = parallelism.tensor
        self._layers = shape.layers
        self._parallelism = parallelism
        self._transfers_s = transfers_s(shape, device, parallelism, BF16_BYTES)
        self._merged = tables.merged
        attention_width = shape.heads * shape.head_dim // tensor
        kv_width = 2 * max(1, shape.kv_heads // tensor) * shape.head_dim
        inner, hidden = shape.intermediate_size // tensor, shape.hidden_size
        gates = shape.feed_forward_matrices - 1
        products = ProductTable(tables.products)
        sizes = [(attention_width + kv_width, hidden), (hidden, attention_width)]
        sizes += [(gates * inner, hidden), (hidden, inner)]
        names = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
        self._products = {name: products.over_rows(n, k) for name, (n, k) in zip(names, sizes, strict=True)}
        self._head = products.over_rows(shape.vocab_size // tensor, hidden)
        moved = BF16_BYTES * (ROUND_TRIPS * hidden + (gates + 1) * inner)
        self._moved_s = moved / (device.memory_bytes_s * usual_utilisation(device).memory)
        self._prefill = fit(regression, tables.prefill)
        self._decode = fit(regression, tables.decode)
        self._reduction = None if tables.reduction is None else fit(regression, tables.reduction)
        self._transfer = None if tables.transfer is None else fit(regression, tables.transfer)

    @property
    def stages(self) -> int:
        return self._parallelism.pipeline

    def row_operators_s(self, rows: FloatArray) -> dict[str, FloatArray]:
        features, layers = rows[:, None], self._layers
        found = {name: MS * layers * product.predict(features) for name, product in self._products.items()}
        found["pointwise"] = layers * self._moved_s * rows
        if self._reduction is not None:
            reduction_ms = np.maximum(0.0, self._reduction.predict(features))
            found["all_reduce"] = MS * layers * REDUCTIONS * reduction_ms
        hops = self._parallelism.pipeline - 1
        if hops and self._transfer is not None:
            found["send_recv"] = MS * hops * np.maximum(0.0, self._transfer.predict(features))
        elif hops:
            fixed_s, each_s = self._transfers_s
            found["send_recv"] = fixed_s + rows * each_s
        if self._parallelism.pass_s:
            found["launch"] = np.full(len(rows), self._parallelism.pass_s)
        return found

    def heads_s(self, rows: FloatArray) -> FloatArray:
        return MS * self._head.predict(rows[:, None])

    def decode_attention_s(self, sequences: int, mean_contexts: FloatArray) -> FloatArray:
        batch = np.full(len(mean_contexts), float(sequences * self._merged))
        decode_ms = self._decode.predict(np.column_stack((batch, mean_contexts)))
        return MS * self._layers * np.maximum(0.0, decode_ms)

    def equivalent_chunk(self, chunks: Chunks) -> tuple[float, float]:
        """Of as many squared tokens, with none before it."""
        squares = sum((before + tokens) ** 2 - before**2 for before, tokens in chunks)
        return 0.0, math.sqrt(squares)

    def prefill_attention_s(self, before: FloatArray, tokens: FloatArray) -> FloatArray:
        squares = (before + tokens) ** 2 - before**2
        return MS * self._layers * np.maximum(0.0, self._prefill.predict(squares[:, None]))

    def prefill_factor(self, chunks: int) -> float:
        return 1.0


class ProductTable:
    """Times of matrix products (m rows, n x k weights). Between the measured n and k it is the time a
    multiplication that is interpolated, over their logarithms: time itself grows with both."""

    def __init__(self, table: Table) -> None:
        self._path = table.path
        rows, n, k = (table.numbers(column, least=1) for column in ("m", "n", "k"))
        times = table.numbers("latency", above=0)
        self._n, self._k = np.unique(n), np.unique(k)
        self._curves: dict[tuple[float, float], tuple[FloatArray, FloatArray]] = {}
        order = np.lexsort((rows, k, n))
        cuts = np.flatnonzero((np.diff(n[order]) != 0) | (np.diff(k[order]) != 0)) + 1
        for group in np.split(order, cuts):
            self._curves[float(n[group[0]]), float(k[group[0]])] = rows[group], times[group]

    def over_rows(self, n: int, k: int) -> "ProductRegressor":
        """Raises PerformanceFileError where none of the measured sizes around is there."""
        corners = [
            (share_n * share_k, at_n, at_k)
            for share_n, at_n in _shares(self._n, n)
            for share_k, at_k in _shares(self._k, k)
            if (at_n, at_k) in self._curves and share_n * share_k > 0
        ]
        if not corners:
            raise PerformanceFileError(self._path, "columns n and k", f"has nothing near {n} and {k}")
        whole = sum(share for share, _, _ in corners)
        rows = np.unique(np.concatenate([self._curves[at_n, at_k][0] for _, at_n, at_k in corners]))
        times = np.zeros(len(rows))
        for share, at_n, at_k in corners:
            ratio = n * k / (at_n * at_k)
            times += share / whole * ratio * np.interp(rows, *self._curves[at_n, at_k])
        return ProductRegressor(rows, times)


class ProductRegressor:
    """Over rows; below the fewest and beyond the most that were measured in proportion to the last two."""

    def __init__(self, rows: FloatArray, times: FloatArray) -> None:
        self._rows, self._times = rows, times
        self._slope = float((times[-1] - times[-2]) / (rows[-1] - rows[-2])) if len(rows) > 1 else 0.0

    def predict(self, features: FloatArray) -> FloatArray:
        rows = features[:, 0]
        inside: FloatArray = np.interp(rows, self._rows, self._times)
        beyond: FloatArray = inside + np.maximum(0.0, rows - self._rows[-1]) * self._slope
        return np.where(rows > 0, beyond, 0.0)


def _shares(measured: FloatArray, wanted: int) -> list[tuple[float, float]]:
    """(share, size) of the sizes around ``wanted``; beyond all of them the last alone."""
    high = int(np.clip(np.searchsorted(measured, wanted), 1, len(measured) - 1))
    low = high - 1
    position = math.log(wanted / measured[low]) / math.log(measured[high] / measured[low])
    share = min(1.0, max(0.0, position))
    return [(1 - share, float(measured[low])), (share, float(measured[high]))]


def _find(directory: Path, name: str) -> Path:
    found = sorted([*directory.glob(f"*{name}.csv"), *directory.glob(f"*{name}.csv.gz")])
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise PerformanceFileError(directory, f"*{name}.csv", f"must be one file; there is {there}")
    return found[0]


def _reductions(directory: Path, row_bytes: int, tensor_parallel: int, measured: Path | None) -> Samples:
    """Over rows. Vidur's samples leave out what a launch takes."""
    if measured is not None:
        samples = reduction_samples(measured, row_bytes, tensor_parallel)
        return replace(samples, values=samples.values + LAUNCH_MS)
    columns = ("num_gpus", "message_size", "backend", "latency")
    table = read_table(_find(directory, "custom_allreduce_perf"), columns)
    chosen = table.select(num_gpus=float(tensor_parallel), backend=GRAPH_BACKEND)
    rows = chosen.numbers("message_size", above=0) / row_bytes
    return Samples("all_reduce", rows[:, None], chosen.numbers("latency", above=0))


def _attention(path: Path, head_dim: int) -> Table:
    table = read_table(path, ATTENTION_COLUMNS, ("window_size",))
    chosen = table.select(head_dim=float(head_dim), attn_dtype=DTYPE, kv_cache_dtype=DTYPE)
    return chosen.select(window_size=FULL_WINDOW) if "window_size" in table.columns else chosen


def _merging(attention: Table, heads: int, kv_heads: int) -> int:
    """The least factor by which both heads and KV heads were measured when divided."""
    measured = set(zip(attention.numbers("num_heads"), attention.numbers("num_key_value_heads"), strict=True))
    for factor in range(1, kv_heads + 1):
        if heads % factor == kv_heads % factor == 0 and (heads / factor, kv_heads / factor) in measured:
            return factor
    rule = f"has no {heads} heads with {kv_heads} KV heads, nor fewer of both"
    raise PerformanceFileError(attention.path, "columns num_heads and num_key_value_heads", rule)


def _decode_samples(generation: Table, heads: int, kv_heads: int) -> Samples:
    rows = generation.select(num_heads=float(heads), num_key_value_heads=float(kv_heads))
    contexts = rows.numbers("isl", least=0) + rows.numbers("step", least=0)
    features = np.column_stack((rows.numbers("batch_size", least=1), contexts))
    return Samples("decode attention", features, rows.numbers("latency", above=0))


def _prefill_samples(context: Table, heads: int, kv_heads: int) -> Samples:
    """Of one sequence, over its squared tokens: several are one of as many."""
    merged = _merging(context, heads, kv_heads)
    rows = context.select(num_heads=float(heads // merged), num_key_value_heads=float(kv_heads // merged))
    tokens, latencies = _of_batch(rows.select(step=0.0), merged)
    return Samples("prefill attention", tokens[:, None] ** 2, latencies)


def _of_batch(rows: Table, size: int) -> tuple[FloatArray, FloatArray]:
    """Tokens of each sequence, and ms of ``size`` at once: where so many were not measured (40 heads over
    four GPUs are five of two), on the line between the next sizes. Raises where none is above or below."""
    sizes = rows.numbers("batch_size", least=1)
    if size in sizes or not sizes.min() < size < sizes.max():
        rows = rows.select(batch_size=float(size))
        return rows.numbers("isl", least=1), rows.numbers("latency", above=0)
    lower, upper = float(sizes[sizes < size].max()), float(sizes[sizes > size].min())
    fewer, more = (
        dict(zip(some.numbers("isl", least=1), some.numbers("latency", above=0), strict=True))
        for some in (rows.select(batch_size=each) for each in (lower, upper))
    )
    tokens = sorted(fewer.keys() & more.keys())
    share = (size - lower) / (upper - lower)
    latencies = [(1 - share) * fewer[each] + share * more[each] for each in tokens]
    return np.array(tokens), np.array(latencies)
