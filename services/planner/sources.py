"""The code that a run hangs on, from a policy to how its arrivals are drawn."""

import hashlib
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
