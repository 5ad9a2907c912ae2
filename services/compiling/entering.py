"""Begins a program anew from the compiled tree of this very source, where there is one."""

import os
import sys
from pathlib import Path

from common.config import ModelConfig
from services.compiling.building import READY, tree_of
from services.source_root import SOURCE, source_root

TREE = "LAMELLA_COMPILED"
"""An environment variable: the tree that this program and those it starts run from. Empty: interpreted."""


def cache_directory() -> Path:
    """Of the environment alone: what simulates needs no mesh's settings."""
    return Path(os.environ.get("LAMELLA_CACHE") or ModelConfig().cache_directory)


def begin_compiled() -> None:
    """Returns where there is no such tree, or none that can be read."""
    if TREE in os.environ:
        return
    try:
        tree = tree_of(cache_directory())
        if not (tree / READY).is_file():
            return
        _note_used(tree)
    except (OSError, RuntimeError):
        # No home, a cache of somebody else, a file that is being edited: it runs interpreted.
        return
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    said = {TREE: str(tree), SOURCE: str(source_root()), "PYTHONPATH": os.pathsep.join(paths)}
    # -P: neither the working directory nor the script's comes before the tree.
    os.execve(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]], {**os.environ, **said})


def _note_used(tree: Path) -> None:
    """The trees that were not used for longest are forgotten first. Another user's cannot be touched."""
    try:
        os.utime(tree / READY)
    except OSError:
        return
