"""Imports at a service's start."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Without collections, which would look through what is imported again and again (0.2 to 0.4 s with
    torch). What was imported stays: with all else that is alive then, no later collection looks at it."""
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
        if len(sys.modules) > before:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
