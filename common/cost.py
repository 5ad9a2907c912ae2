"""What one decode step costs: bytes, FLOPs, roofline times, the link between the pools, tokens per dollar.

Pure arithmetic over shapes and devices: no torch, no IO, no clock. The notation is the papers'
(Disaggregation, Table 2): N parameters, d hidden size, L layers, G query heads per KV head, e bytes per
element, B batch, l context. "Offloading" and "Disaggregation" are Lamina's two papers (``common.devices``).

Every time is a roofline's: the larger of computing and memory time on devices that share the work without
loss, at the utilisation given. At 1 it is a lower bound of what a machine needs, so a bandwidth that follows
from it is an upper bound of what the link must carry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.devices import DeviceSpec
from common.shapes import ModelShape

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp32": 4}
"""How weights and KV are stored. Arithmetic is at the bf16 rate whatever is stored."""

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator asks of a device in one decode step."""

    flops: float
    bytes_moved: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes_moved


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of a device's peaks that kernels reach, 0 < share ≤ 1: MFU and MBU. 1 is the plain roofline."""

    compute: float = 1.0
    memory: float = 1.0


PLAIN_ROOFLINE = Utilisation()


@dataclass(frozen=True, slots=True)
class LinkAssumptions:
    """What a paper counts when it asks how fast the link between the pools must be.

    ``slack``: the share of the computing time that the link may take.
    """

    name: str
    source: str
    is_kv_grouped: bool
    is_attention_time_counted: bool
    slack: float


OFFLOADING_LINK = LinkAssumptions("offloading", "Offloading, 4.2", False, False, 1.0)
"""Q, K, V and the output are all d wide (4edBL); the link may take as long as the other operators do."""

DISAGGREGATION_LINK = LinkAssumptions("disaggregation", "Disaggregation, 3.1", True, True, 0.2)
"""K and V are d/G wide ((2 + 2/G)edBL); the link may add 20 % to attention and the other operators."""

LINK_ASSUMPTIONS = (OFFLOADING_LINK, DISAGGREGATION_LINK)


def kv_token_bytes(shape: ModelShape, element_bytes: int) -> int:
    """KV of one token over all layers, bytes: 2 · L · (d/G) · e (Disaggregation, 2.2.2)."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * element_bytes


def weight_bytes(shape: ModelShape, element_bytes: int) -> int:
    """All weights as they lie in memory, bytes: e for each parameter, looked-up ones too."""
    return shape.parameters * element_bytes


def model_work(shape: ModelShape, batch: int, element_bytes: int) -> Work:
    """Everything but attention, one token for each of ``batch`` sequences, all layers.

    FLOPs 2NB; bytes e(N + 2BdL): each weight once, and each block's input and output. Disaggregation 2.2.1
    writes e(N + 2Bd), one block's activations; Offloading 3.1 writes e(N + Bd).
    """
    weights = shape.multiplied_parameters
    activations = 2 * batch * shape.hidden_size * shape.layers
    return Work(2.0 * weights * batch, float(element_bytes * (weights + activations)))


def attention_work(shape: ModelShape, batch: int, context: int, element_bytes: int) -> Work:
    """The attention operator, one token for each of ``batch`` sequences of ``context`` tokens, all layers.

    FLOPs 4BlL · heads · head_dim (scores and weighted sum); bytes: the KV of every token, Q and the output.
    The intensity stays near 2G/e whatever the batch (Disaggregation, 2.2.2; Offloading, 3.1).
    """
    width = shape.layers * shape.heads * shape.head_dim
    queries_and_outputs = 2 * batch * width * element_bytes
    kv = batch * context * kv_token_bytes(shape, element_bytes)
    return Work(4.0 * batch * context * width, float(kv + queries_and_outputs))


def roofline_s(
    work: Work, device: DeviceSpec, *, devices: int = 1, utilisation: Utilisation = PLAIN_ROOFLINE
) -> float:
    """Seconds: the larger of computing and memory time on ``devices`` that share the work evenly."""
    computing_s = work.flops / (devices * device.peak_flop_s * utilisation.compute)
    memory_s = work.bytes_moved / (devices * device.memory_bytes_s * utilisation.memory)
    return max(computing_s, memory_s)


def is_compute_bound(work: Work, device: DeviceSpec, utilisation: Utilisation = PLAIN_ROOFLINE) -> bool:
    """Whether computing takes longer than memory, on any number of devices."""
    ridge = device.peak_flop_s * utilisation.compute / (device.memory_bytes_s * utilisation.memory)
    return work.intensity > ridge


def implied_mfu(flops: float, elapsed_s: float, device: DeviceSpec, devices: int = 1) -> float:
    """The share of the devices' peak FLOP/s that ``flops`` in ``elapsed_s`` come to."""
    return flops / (elapsed_s * devices * device.peak_flop_s)


def exchanged_bytes(
    shape: ModelShape, batch: int, element_bytes: int, assumptions: LinkAssumptions = DISAGGREGATION_LINK
) -> int:
    """Bytes between the pools in one decode step, both directions together: Q, K, V out, the output back.

    (2 + 2/G)edBL, or 4edBL where KV is not counted as grouped.
    """
    kv_heads = shape.kv_heads if assumptions.is_kv_grouped else shape.heads
    return 2 * (shape.heads + kv_heads) * shape.head_dim * batch * shape.layers * element_bytes


def minimum_link_bytes_s(
    shape: ModelShape,
    batch: int,
    element_bytes: int,
    *,
    model_s: float,
    attention_s: float,
    assumptions: LinkAssumptions,
    slack: float | None = None,
) -> float:
    """The least bandwidth between the pools, bytes/s: data over the time that the link may take.

    ``model_s`` and ``attention_s`` are one step's times of all but attention and of attention (MTIME, ATIME).
    Offloading 4.2: 4edBL / MTIME. Disaggregation 3.1: (2 + 2/G)edBL / (α · (MTIME + ATIME)).
    ``slack`` replaces the assumptions' own α.
    """
    computing_s = model_s + (attention_s if assumptions.is_attention_time_counted else 0.0)
    allowed_s = computing_s * (assumptions.slack if slack is None else slack)
    return exchanged_bytes(shape, batch, element_bytes, assumptions) / allowed_s


def link_implied_mfu(
    link_bytes_s: float, shape: ModelShape, element_bytes: int, device: DeviceSpec, devices: int
) -> float:
    """Solves Offloading 4.2, bandwidth = 2edL · MFU · peak / N, for MFU (the paper leaves out the peak)."""
    token_bytes = exchanged_bytes(shape, 1, element_bytes, OFFLOADING_LINK)
    return implied_mfu(2.0 * shape.multiplied_parameters, token_bytes / link_bytes_s, device, devices)


def largest_batch(
    shape: ModelShape,
    context: int,
    element_bytes: int,
    device: DeviceSpec,
    *,
    devices: int = 1,
    holds_weights: bool,
) -> int:
    """Sequences of ``context`` tokens whose KV fits the devices' whole memory, beside the weights or alone.

    0 where the weights alone do not fit, or not one sequence beside them (Disaggregation, 2.2.2).
    """
    room = devices * device.memory_bytes - (weight_bytes(shape, element_bytes) if holds_weights else 0)
    return max(0, int(room // (context * kv_token_bytes(shape, element_bytes))))


def fewest_devices(shape: ModelShape, element_bytes: int, device: DeviceSpec) -> int:
    """Devices whose memory holds the weights."""
    return int(-(-weight_bytes(shape, element_bytes) // device.memory_bytes))


@dataclass(frozen=True, slots=True)
class Throughput:
    """A pool's decode throughput. ``a`` devices compute the model, ``b`` attention; b = 0: all do both."""

    a: int
    b: int
    price_usd_h: float
    batch: int
    step_s: float
    tokens_s: float

    @property
    def tokens_usd(self) -> float:
        """Tokens per dollar."""
        return self.tokens_s * SECONDS_PER_HOUR / self.price_usd_h


def disaggregated_throughput(
    shape: ModelShape,
    context: int,
    element_bytes: int,
    model_device: DeviceSpec,
    attention_device: DeviceSpec,
    dop: tuple[int, int],
    *,
    is_staggered: bool,
    utilisation: Utilisation = PLAIN_ROOFLINE,
    most_s: float | None = None,
) -> Throughput | None:
    """At the largest batch that fits ``dop`` = (a, b) and whose step takes at most ``most_s``, or None where
    weights or KV do not fit, or not one sequence is that fast.

    A step is model, exchange and attention in turn. Staggered, two batches with half the KV each share one
    replica (Disaggregation 4.3, n = 2): a step of both takes the longest of all three in turn, the model
    twice and attention twice. The link is the slower pool's adapters together.
    """
    a, b = dop
    held = largest_batch(shape, context, element_bytes, attention_device, devices=b, holds_weights=False)
    batches = 2 if is_staggered else 1
    batch = held // batches
    if weight_bytes(shape, element_bytes) > a * model_device.memory_bytes or batch == 0:
        return None
    link_bytes_s = min(a * model_device.network_bytes_s, b * attention_device.network_bytes_s)

    def step_s(batch: int) -> float:
        model = model_work(shape, batch, element_bytes)
        attention = attention_work(shape, batch, context, element_bytes)
        model_s = roofline_s(model, model_device, devices=a, utilisation=utilisation)
        attention_s = roofline_s(attention, attention_device, devices=b, utilisation=utilisation)
        turn_s = model_s + attention_s + exchanged_bytes(shape, batch, element_bytes) / link_bytes_s
        return max(turn_s, batches * model_s, batches * attention_s)

    batch = batch if most_s is None else largest_within(step_s, batch, most_s)
    if batch == 0:
        return None
    price = a * model_device.price_usd_h + b * attention_device.price_usd_h
    seconds = step_s(batch)
    return Throughput(a, b, price, batches * batch, seconds, batches * batch / seconds)


def largest_within(step_s: Callable[[int], float], most: int, most_s: float) -> int:
    """The largest batch up to ``most`` whose step takes no longer; 0: none. Steps grow with the batch."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= most_s else (low, middle)
    return low


def homogeneous_throughput(
    shape: ModelShape,
    context: int,
    element_bytes: int,
    device: DeviceSpec,
    devices: int,
    *,
    utilisation: Utilisation = PLAIN_ROOFLINE,
    most_s: float | None = None,
) -> Throughput | None:
    """``devices`` that hold weights and KV together (tensor parallelism without its losses), or None."""

    def step_s(batch: int) -> float:
        works = (
            model_work(shape, batch, element_bytes),
            attention_work(shape, batch, context, element_bytes),
        )
        return sum(roofline_s(work, device, devices=devices, utilisation=utilisation) for work in works)

    batch = largest_batch(shape, context, element_bytes, device, devices=devices, holds_weights=True)
    batch = batch if most_s is None else largest_within(step_s, batch, most_s)
    if batch == 0:
        return None
    seconds = step_s(batch)
    return Throughput(devices, 0, devices * device.price_usd_h, batch, seconds, batch / seconds)
