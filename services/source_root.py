"""Where the source of what runs lies: a program that runs compiled does so from a copy in the cache."""

import os
from pathlib import Path

SOURCE = "LAMELLA_SOURCE"
"""An environment variable, of a program that was begun from a copy."""


def source_root() -> Path:
    """The folder of the packages, beside which ``deploy`` is."""
    return Path(os.environ.get(SOURCE) or Path(__file__).resolve().parents[1])
