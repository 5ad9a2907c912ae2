"""Imports at a service's start."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """What is imported within stays. Collections amid it would look through it again and again: 0.2 to 0.4 s
    with torch."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
