"""What a run hangs on beside what is asked of it: the code, from a policy to how its arrivals are drawn, and
what its files of performance hold."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "attention",
    "common",
    "decode",
    "gateway",
    "prefill",
    "scheduler",
    "services/analysis",
    "services/bench",
    "services/hosts",
    "services/launcher",
    "services/planner",
    "services/simulator",
)
"""More than a run loads: what was kept is simulated anew sooner than taken for what it no longer is."""


def sources_digest(root: Path) -> str:
    """Of all that is written there, file names with it."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@cache
def own_digest() -> str:
    """Of the code that runs."""
    return sources_digest(ROOT)


def files_digest(paths: Iterable[Path]) -> str:
    """Of what files hold, and of all that are in folders, with their names there. One that is not there has
    nothing: whoever opens it says so. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for each in files:
            if each.is_file():
                with each.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{each.relative_to(path).as_posix()} {content}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()
