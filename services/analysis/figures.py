"""``lamella analyze``'s figures as values: the cost formulas over devices, batches, contexts and ratios.

Nothing is printed here. Times are a roofline's on as few devices as hold the weights, which share the work
without loss.
"""

from collections.abc import Iterator
from itertools import product

import msgspec

from common.cost import (
    ELEMENT_BYTES,
    LINK_ASSUMPTIONS,
    Throughput,
    Utilisation,
    attention_work,
    disaggregated_throughput,
    fewest_devices,
    homogeneous_throughput,
    implied_mfu,
    is_compute_bound,
    kv_token_bytes,
    largest_batch,
    minimum_link_bytes_s,
    model_work,
    roofline_s,
    weight_bytes,
)
from common.devices import DeviceSpec
from common.shapes import ModelShape

HEADER_LIMIT_BYTES = 100 << 20
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
OUTPUT_MATRIX = "lm_head.weight"


class AnalysisConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to analyse. The first device computes the model; the others, or itself, compute attention."""

    devices: tuple[DeviceSpec, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    ratios: tuple[tuple[int, int], ...]
    dtype: str
    slack: float | None
    utilisation: Utilisation

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def attention_devices(self) -> tuple[DeviceSpec, ...]:
        return self.devices[1:] or self.devices


class ModelPoint(msgspec.Struct, frozen=True):
    """Everything but attention, one step on as few devices as hold the weights."""

    device: str
    devices: int
    batch: int
    flops: float
    bytes_moved: float
    step_s: float
    is_compute_bound: bool
    mfu: float


class AttentionPoint(msgspec.Struct, frozen=True):
    """The attention operator on as many devices; ``share`` is attention's of a whole step there."""

    device: str
    devices: int
    batch: int
    context: int
    flops: float
    bytes_moved: float
    step_s: float
    is_compute_bound: bool
    share: float


class LinkPoint(msgspec.Struct, frozen=True):
    """The least bandwidth between ``devices`` of each pool, all links together."""

    assumptions: str
    slack: float
    model_device: str
    attention_device: str
    devices: int
    batch: int
    context: int
    gb_s: float


class BatchPoint(msgspec.Struct, frozen=True):
    """The largest batch in one device's memory: beside the weights (0: they do not fit), and KV alone."""

    device: str
    context: int
    devices_for_weights: int
    beside_weights: int
    kv_alone: int


class ThroughputPoint(msgspec.Struct, frozen=True):
    """One configuration at its largest batch; ``kind`` is homogeneous, disaggregated or staggered."""

    kind: str
    model_device: str
    attention_device: str
    context: int
    result: Throughput
    tokens_usd: float


class Analysis(msgspec.Struct, frozen=True):
    """Everything about one model."""

    model: ModelShape
    config: AnalysisConfig
    weight_bytes: int
    kv_token_bytes: int
    model_points: tuple[ModelPoint, ...]
    attention_points: tuple[AttentionPoint, ...]
    link_points: tuple[LinkPoint, ...]
    batch_points: tuple[BatchPoint, ...]
    throughput_points: tuple[ThroughputPoint, ...]


def analyse(shape: ModelShape, config: AnalysisConfig) -> Analysis:
    return Analysis(
        model=shape,
        config=config,
        weight_bytes=weight_bytes(shape, config.element_bytes),
        kv_token_bytes=kv_token_bytes(shape, config.element_bytes),
        model_points=tuple(_model_points(shape, config)),
        attention_points=tuple(_attention_points(shape, config)),
        link_points=tuple(_link_points(shape, config)),
        batch_points=tuple(_batch_points(shape, config)),
        throughput_points=tuple(_throughput_points(shape, config)),
    )


def _step_times(
    shape: ModelShape,
    batch: int,
    context: int,
    config: AnalysisConfig,
    devices: tuple[DeviceSpec, DeviceSpec],
    count: int,
) -> tuple[float, float]:
    """Roofline seconds of one step's (all but attention, attention), on ``count`` of each of two devices."""
    model = model_work(shape, batch, config.element_bytes)
    attention = attention_work(shape, batch, context, config.element_bytes)
    return (
        roofline_s(model, devices[0], devices=count, utilisation=config.utilisation),
        roofline_s(attention, devices[1], devices=count, utilisation=config.utilisation),
    )


def _model_points(shape: ModelShape, config: AnalysisConfig) -> Iterator[ModelPoint]:
    for device, batch in product(config.devices, config.batches):
        count = fewest_devices(shape, config.element_bytes, device)
        work = model_work(shape, batch, config.element_bytes)
        step_s = roofline_s(work, device, devices=count, utilisation=config.utilisation)
        yield ModelPoint(
            device=device.name,
            devices=count,
            batch=batch,
            flops=work.flops,
            bytes_moved=work.bytes_moved,
            step_s=step_s,
            is_compute_bound=is_compute_bound(work, device, config.utilisation),
            mfu=implied_mfu(work.flops, step_s, device, count),
        )


def _attention_points(shape: ModelShape, config: AnalysisConfig) -> Iterator[AttentionPoint]:
    for device, batch, context in product(config.devices, config.batches, config.contexts):
        count = fewest_devices(shape, config.element_bytes, device)
        work = attention_work(shape, batch, context, config.element_bytes)
        model_s, step_s = _step_times(shape, batch, context, config, (device, device), count)
        yield AttentionPoint(
            device=device.name,
            devices=count,
            batch=batch,
            context=context,
            flops=work.flops,
            bytes_moved=work.bytes_moved,
            step_s=step_s,
            is_compute_bound=is_compute_bound(work, device, config.utilisation),
            share=step_s / (model_s + step_s),
        )


def _link_points(shape: ModelShape, config: AnalysisConfig) -> Iterator[LinkPoint]:
    model_device = config.devices[0]
    count = fewest_devices(shape, config.element_bytes, model_device)
    settings = product(config.attention_devices, LINK_ASSUMPTIONS, config.batches, config.contexts)
    for attention_device, assumptions, batch, context in settings:
        slack = assumptions.slack if config.slack is None else config.slack
        pools = (model_device, attention_device)
        model_s, attention_s = _step_times(shape, batch, context, config, pools, count)
        needed = minimum_link_bytes_s(
            shape,
            batch,
            config.element_bytes,
            model_s=model_s,
            attention_s=attention_s,
            assumptions=assumptions,
            slack=slack,
        )
        yield LinkPoint(
            assumptions=assumptions.name,
            slack=slack,
            model_device=model_device.name,
            attention_device=attention_device.name,
            devices=count,
            batch=batch,
            context=context,
            gb_s=needed / 1e9,
        )


def _batch_points(shape: ModelShape, config: AnalysisConfig) -> Iterator[BatchPoint]:
    for device, context in product(config.devices, config.contexts):
        beside, alone = (
            largest_batch(shape, context, config.element_bytes, device, holds_weights=holds)
            for holds in (True, False)
        )
        count = fewest_devices(shape, config.element_bytes, device)
        yield BatchPoint(device.name, context, count, beside, alone)


def _throughput_points(shape: ModelShape, config: AnalysisConfig) -> Iterator[ThroughputPoint]:
    counts = sorted({count for ratio in config.ratios for count in (*ratio, sum(ratio))})
    for context, device, count in product(config.contexts, config.devices, counts):
        found = homogeneous_throughput(
            shape, context, config.element_bytes, device, count, utilisation=config.utilisation
        )
        if found:
            yield ThroughputPoint("homogeneous", device.name, device.name, context, found, found.tokens_usd)
    first = config.devices[0]
    settings = product(config.contexts, config.attention_devices, config.ratios, (False, True))
    for context, other, ratio, is_staggered in settings:
        found = disaggregated_throughput(
            shape,
            context,
            config.element_bytes,
            first,
            other,
            ratio,
            is_staggered=is_staggered,
            utilisation=config.utilisation,
        )
        if found:
            kind = "staggered" if is_staggered else "disaggregated"
            yield ThroughputPoint(kind, first.name, other.name, context, found, found.tokens_usd)
