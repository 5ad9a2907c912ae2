"""What a thread is called, in Python and, where that is Linux, by the kernel (``top -H``)."""

import threading
from contextlib import suppress
from pathlib import Path

LONGEST = 15
"""Characters that Linux keeps."""


def name_thread(name: str) -> None:
    """The thread that calls this; those that it starts are called so by the kernel, too."""
    threading.current_thread().name = name
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:LONGEST])
