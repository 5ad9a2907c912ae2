"""Lamina's choice of (a, b): how many devices compute the model and how many hold KV and compute attention,
by the cost model (``common.cost``), and the batch that goes with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from common.cost import (
    SECONDS_PER_HOUR,
    Throughput,
    Utilisation,
    disaggregated_throughput,
    homogeneous_throughput,
)
from common.devices import DEVICES
from common.shapes import ModelShape

REACHED = Utilisation(compute=0.75, memory=0.8)
"""As the roofline performance model takes it."""


@dataclass(frozen=True, slots=True)
class RatioChoice:
    """``attention``: None where the same devices do both. ``tokens_usd``: tokens per dollar."""

    model_device: str
    attention_device: str | None
    throughput: Throughput
    tokens_usd: float

    @property
    def dop(self) -> tuple[int, int]:
        return self.throughput.a, self.throughput.b

    @property
    def devices(self) -> int:
        return self.throughput.a + self.throughput.b


def choose_ratio(
    shape: ModelShape,
    context_tokens: int,
    element_bytes: int,
    devices: Sequence[str],
    prices: Mapping[str, float],
    *,
    most_devices: int,
    step_s: float | None,
    is_staggered: bool = True,
) -> list[RatioChoice]:
    """Every ratio of up to ``most_devices``, most tokens per dollar first. ``step_s``: that a step may take;
    the batch is the largest within it."""
    priced = {name: replace(DEVICES[name], price_usd_h=prices[name]) for name in devices}
    found: list[RatioChoice] = []
    for first, second in product(devices, devices):
        for a, b in product(range(1, most_devices), repeat=2):
            if a + b > most_devices or shape.heads % a:
                continue
            each = disaggregated_throughput(
                shape,
                context_tokens,
                element_bytes,
                priced[first],
                priced[second],
                (a, b),
                is_staggered=is_staggered,
                utilisation=REACHED,
                most_s=step_s,
            )
            if each is not None:
                found.append(_choice(first, second, each))
    for name in devices:
        for count in range(1, most_devices + 1):
            if shape.heads % count:
                continue
            each = homogeneous_throughput(
                shape,
                context_tokens,
                element_bytes,
                priced[name],
                count,
                utilisation=REACHED,
                most_s=step_s,
            )
            if each is not None:
                found.append(_choice(name, None, each))
    return sorted(
        found,
        key=lambda each: (-each.tokens_usd, each.devices, each.model_device, each.attention_device or ""),
    )


def _choice(model_device: str, attention_device: str | None, throughput: Throughput) -> RatioChoice:
    tokens_usd = throughput.tokens_s * SECONDS_PER_HOUR / throughput.price_usd_h
    return RatioChoice(model_device, attention_device, throughput, tokens_usd)
