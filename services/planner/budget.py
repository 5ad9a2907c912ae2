"""What all devices of a deployment may take: so many of them, dollars an hour, watts. Within the last two
Splitwise provisions for throughput, iso-cost and iso-power (IV-D, VI-B)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.devices import DeviceSpec
from common.errors import ConfigError

Parts = Sequence[tuple[str, int]]
"""Kinds of devices, and how many of each."""
MAX_GPUS, MAX_COST, MAX_POWER = "--max-gpus", "--max-cost", "--max-power"
ROUNDING = 1e-9
"""Of a limit: sums of dollars may come out that much over what they are."""


@dataclass(frozen=True, slots=True)
class Limit:
    """``by_device``: what one device takes of ``most``. ``amount``: how that is written."""

    option: str
    most: float
    by_device: Mapping[str, float]
    amount: str

    def taken(self, parts: Parts) -> float:
        return sum(self.by_device[device] * count for device, count in parts)

    def allows(self, taken: float) -> bool:
        return taken <= (1 + ROUNDING) * self.most

    def most_of(self, parts: Parts, beside: Parts) -> int:
        return math.floor(((1 + ROUNDING) * self.most - self.taken(beside)) / self.taken(parts))


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds nothing where it has no limits."""

    limits: tuple[Limit, ...] = ()

    def __str__(self) -> str:
        return " and ".join(f"{limit.option} {limit.most:.10g}" for limit in self.limits)

    @property
    def within(self) -> str:
        """The end of a sentence."""
        return f" within {self}" if self.limits else ""

    @property
    def max_devices(self) -> int | None:
        return next((int(limit.most) for limit in self.limits if limit.option == MAX_GPUS), None)

    def share(self, parts: Parts) -> float:
        """The largest that they take of any limit; over 1: too much."""
        return max((limit.taken(parts) / limit.most for limit in self.limits), default=0.0)

    def allows(self, parts: Parts, count: int = 1) -> bool:
        """So many times the parts."""
        return all(limit.allows(count * limit.taken(parts)) for limit in self.limits)

    def most_of(self, parts: Parts, beside: Parts = ()) -> int:
        """How many times the parts, beside others. Of a budget that has a limit."""
        return max(0, min(limit.most_of(parts, beside) for limit in self.limits))

    def gpus(self, parts: Parts) -> str:
        """How many they are, and what they take of what else is limited."""
        return f"{sum(count for _, count in parts)} GPUs{self.price(parts)}"

    def price(self, parts: Parts) -> str:
        """What they take of all that is limited but their number."""
        said = [limit.amount.format(limit.taken(parts)) for limit in self.limits if limit.option != MAX_GPUS]
        return f" at {' and '.join(said)}" if said else ""

    def least_over(self, some: Sequence[Parts]) -> str:
        """Of limits that all of them are over: the least that any takes."""
        least = [(limit, min(map(limit.taken, some), default=0.0)) for limit in self.limits]
        return " and ".join(limit.amount.format(each) for limit, each in least if not limit.allows(each))


def budget_of(
    devices: Sequence[DeviceSpec],
    max_devices: int | None = None,
    max_usd_h: float | None = None,
    max_power_w: float | None = None,
) -> Budget:
    """Of these devices. Raises ConfigError for a limit that is none, and for one of watts where nobody says
    what a device draws."""
    limits: list[Limit] = []
    if max_devices is not None:
        limits.append(Limit(MAX_GPUS, max_devices, {each.name: 1.0 for each in devices}, "{:.0f} GPUs"))
    if max_usd_h is not None:
        if not 0 < max_usd_h < math.inf:
            raise ConfigError(MAX_COST, max_usd_h, "must be dollars an hour, over 0")
        prices = {each.name: each.price_usd_h for each in devices}
        limits.append(Limit(MAX_COST, max_usd_h, prices, "${:,.2f}/h"))
    if max_power_w is not None:
        if not 0 < max_power_w < math.inf:
            raise ConfigError(MAX_POWER, max_power_w, "must be watts, over 0")
        draws: dict[str, float] = {}
        for each in devices:
            if each.power_w is None:
                raise ConfigError(MAX_POWER, max_power_w, f"nobody says what {each.name} draws")
            draws[each.name] = each.power_w
        limits.append(Limit(MAX_POWER, max_power_w, draws, "{:,.0f} W"))
    return Budget(tuple(limits))
