"""A profile's own process allocates memory as instances do, or it measures what they never take."""

import ctypes
import os

from services.launcher.launch_plan import ALLOCATOR_ENVIRONMENT

MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_THRESHOLD = -1, -3
"""glibc's numbers."""
LARGEST_INT = (1 << 31) - 1


def allocate_as_instances() -> None:
    """Freed memory is kept, and waiting threads sleep, as in processes that the launcher starts with this
    environment. Threads: where torch has not begun any."""
    os.environ.setdefault("OMP_WAIT_POLICY", ALLOCATOR_ENVIRONMENT["OMP_WAIT_POLICY"])
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # no glibc
        return
    for option, key in (
        (MALLOPT_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_"),
        (MALLOPT_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_"),
    ):
        mallopt(option, min(int(ALLOCATOR_ENVIRONMENT[key]), LARGEST_INT))
