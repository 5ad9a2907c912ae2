"""Lamina's choice of (a, b): how many devices compute the model and how many hold KV and compute attention,
by the cost model (``common.cost``), and the batch that goes with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from common.cost import Throughput, disaggregated_throughput, homogeneous_throughput
from common.devices import DeviceSpec
from common.shapes import ModelShape
from services.simulator.performance.roofline import usual_utilisation


@dataclass(frozen=True, slots=True)
class RatioChoice:
    """``attention_device``: None where the same devices do both."""

    model_device: str
    attention_device: str | None
    throughput: Throughput

    @property
    def dop(self) -> tuple[int, int]:
        return self.throughput.a, self.throughput.b

    @property
    def devices(self) -> int:
        return self.throughput.a + self.throughput.b

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Kinds of devices, and how many of each."""
        own = (self.model_device, self.throughput.a)
        return (own,) if self.attention_device is None else (own, (self.attention_device, self.throughput.b))

    @property
    def tokens_usd(self) -> float:
        return self.throughput.tokens_usd


def choose_ratio(
    shape: ModelShape,
    context_tokens: int,
    element_bytes: int,
    devices: Sequence[DeviceSpec],
    *,
    most_devices: int,
    step_s: float | None,
    is_staggered: bool = True,
    memory_share: float = 1.0,
) -> list[RatioChoice]:
    """Every ratio of up to ``most_devices``, most tokens per dollar first. ``step_s``: that a step may take;
    the batch is the largest within it. ``memory_share``: of a device's, for weights and KV."""
    found: list[RatioChoice] = []
    used = [_usable(each, memory_share) for each in devices]
    for first, second in product(used, used):
        for a, b in product(range(1, most_devices), repeat=2):
            if a + b > most_devices or shape.heads % a:
                continue
            each = disaggregated_throughput(
                shape,
                context_tokens,
                element_bytes,
                first,
                second,
                (a, b),
                is_staggered=is_staggered,
                most_s=step_s,
            )
            if each is not None:
                found.append(RatioChoice(first.name, second.name, each))
    for device in used:
        for count in range(1, most_devices + 1):
            if shape.heads % count:
                continue
            each = homogeneous_throughput(
                shape,
                context_tokens,
                element_bytes,
                device,
                count,
                most_s=step_s,
            )
            if each is not None:
                found.append(RatioChoice(device.name, None, each))
    return sorted(
        found,
        key=lambda each: (-each.tokens_usd, each.devices, each.model_device, each.attention_device or ""),
    )


def _usable(device: DeviceSpec, memory_share: float) -> DeviceSpec:
    """What is left of its memory, and of its rates what is usually reached."""
    reached = usual_utilisation(device)
    return replace(
        device,
        bf16_tflops=reached.compute * device.bf16_tflops,
        memory_gb_s=reached.memory * device.memory_gb_s,
        memory_gb=memory_share * device.memory_gb,
    )
