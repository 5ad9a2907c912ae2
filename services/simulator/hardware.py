"""What a run's devices did, drew and cost: model FLOPs and bytes over their peaks, watts, dollars.

FLOPs and bytes are the cost formulas' (``common.cost``), counted as the roofline counts them. Where a pool's
device, or a figure of it, is not known, neither is what follows from it, nor any sum that it belongs to.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from common.cost import SECONDS_PER_HOUR
from common.devices import DeviceSpec
from common.shapes import ModelShape
from services.simulator.computed_work import ComputedWork
from services.simulator.config import Pool


class PoolHardware(msgspec.Struct, frozen=True):
    """``devices``: of all its instances, on average. ``mean_w``: power times the busy share; what an idle
    device draws no data sheet says. ``usd_h``: idle or not. ``mfu`` and ``mbu``: of peak FLOP/s (bf16) and
    memory bandwidth, while its instances compute."""

    name: str
    device: str | None
    devices: float
    mean_w: float | None
    usd_h: float | None
    mfu: float | None
    mbu: float | None


class HardwareMetrics(msgspec.Struct, frozen=True):
    """Sums over pools, and requests that are done for what was drawn and paid in the run."""

    pools: tuple[PoolHardware, ...]
    mean_w: float | None
    usd_h: float | None
    requests_per_kwh: float | None
    requests_per_usd: float | None


@dataclass(frozen=True, slots=True)
class PoolDevices:
    """A pool's: ``each`` of its instances or workers has so many."""

    name: str
    device: DeviceSpec | None
    each: int

    @staticmethod
    def of(pool: Pool) -> "PoolDevices":
        replicas = 1 if pool.remote is None else pool.remote.turns.replicas
        return PoolDevices(pool.config.name, pool.device, replicas * pool.config.all_devices)


def pool_hardware(
    pool: PoolDevices,
    shape: ModelShape,
    element_bytes: int,
    instances: float,
    work: Sequence[ComputedWork],
    busy_s: float,
    elapsed_s: float,
) -> PoolHardware:
    """``instances``: on average. ``work`` of each life of one, and ``busy_s`` of all."""
    device = pool.device
    devices = instances * pool.each
    mean_w = mfu = mbu = None
    if device is not None and device.power_w is not None and elapsed_s > 0:
        mean_w = busy_s / elapsed_s * pool.each * device.power_w
    if device is not None and busy_s > 0:
        device_s = busy_s * pool.each
        flops = math.fsum(each.flops(shape) for each in work)
        moved_bytes = math.fsum(each.moved_bytes(shape, element_bytes) for each in work)
        mfu, mbu = flops / (device_s * device.peak_flop_s), moved_bytes / (device_s * device.memory_bytes_s)
    return PoolHardware(
        name=pool.name,
        device=None if device is None else device.name,
        devices=devices,
        mean_w=mean_w,
        usd_h=None if device is None else devices * device.price_usd_h,
        mfu=mfu,
        mbu=mbu,
    )


def hardware_of(pools: Sequence[PoolHardware], done: int, elapsed_s: float) -> HardwareMetrics:
    mean_w, usd_h = _sum(each.mean_w for each in pools), _sum(each.usd_h for each in pools)
    hours = elapsed_s / SECONDS_PER_HOUR
    return HardwareMetrics(
        pools=tuple(pools),
        mean_w=mean_w,
        usd_h=usd_h,
        requests_per_kwh=done / (mean_w / 1e3 * hours) if mean_w and hours else None,
        requests_per_usd=done / (usd_h * hours) if usd_h and hours else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """None where one is."""
    known = list(values)
    total = math.fsum(each for each in known if each is not None)
    return None if None in known else total
