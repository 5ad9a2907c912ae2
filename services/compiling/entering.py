"""Begins a program anew from the compiled tree of this very source, where there is one."""

import os
import sys

from common.config_file import load_config
from services.compiling.building import READY, tree_of

TREE = "LAMELLA_COMPILED"
"""An environment variable: the tree that this program and those it starts run from. Empty: interpreted."""


def begin_compiled() -> None:
    """Raises ConfigError, where the environment names no cache directory."""
    if TREE in os.environ:
        return
    tree = tree_of(load_config(None).model.cache_directory)
    if not (tree / READY).is_file():
        return
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, TREE: str(tree), "PYTHONPATH": os.pathsep.join(paths)}
    # -P: neither the working directory nor the script's comes before the tree.
    os.execve(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]], environment)
