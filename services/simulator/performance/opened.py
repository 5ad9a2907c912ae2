"""Sources that were opened before: a plan simulates thousands of runs on the same few, and files of measured
kernels take a second to read."""

from functools import lru_cache
from pathlib import Path

import msgspec

from common.devices import DeviceSpec
from common.shapes import ModelShape
from services.simulator.performance.roofline import Parallelism
from services.simulator.performance.sources import OpenedSource, PerformanceSource, open_source

MOST_OPENED = 64
"""That are kept, those that were last asked for."""
Stamp = tuple[str, int, int]
"""Of a file: its name, when it was written, its size."""


def open_once(
    source: PerformanceSource, shape: ModelShape, device: DeviceSpec | None, parallelism: Parallelism
) -> OpenedSource:
    """As ``open_source``; the same one again as long as its files are what they were."""
    return _opened(source, shape, device, parallelism, _stamps(source))


@lru_cache(MOST_OPENED)
def _opened(
    source: PerformanceSource,
    shape: ModelShape,
    device: DeviceSpec | None,
    parallelism: Parallelism,
    stamps: tuple[Stamp, ...],
) -> OpenedSource:
    return open_source(source, shape, device, parallelism)


def _stamps(source: PerformanceSource) -> tuple[Stamp, ...]:
    """None of what is not there: opening says so."""
    found: list[Stamp] = []
    for value in msgspec.structs.astuple(source):
        if isinstance(value, Path):
            files = sorted(value.iterdir()) if value.is_dir() else [value]
            stats = ((path.name, path.stat()) for path in files if path.exists())
            found += [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
    return tuple(found)
