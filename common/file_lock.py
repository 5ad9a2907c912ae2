"""One process at a time, by a lock on a file; and what it makes is there whole or not at all."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Waits for its turn. The lock goes with the process that held it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """A directory beside ``target``, to be renamed to it when it is complete, and else gone with the block.
    For who holds the target's lock: those of whoever was killed amid it are taken away."""
    prefix = f".converting-{target.name}-"
    for left in target.parent.iterdir():
        if left.name.startswith(prefix):
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
