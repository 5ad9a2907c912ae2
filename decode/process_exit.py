"""Whether another process of this host has ended, as the kernel tells."""

import select
from collections.abc import Callable


def has_exited(pidfd: int | None) -> Callable[[], bool]:
    """Asks whether that very process has ended; across hosts schedulers tell, or silence."""
    if pidfd is None:
        return lambda: False

    def is_gone() -> bool:
        # Asked by two threads, and a poll object refuses the second.
        exits = select.poll()
        exits.register(pidfd, select.POLLIN)
        return bool(exits.poll(0))

    return is_gone
