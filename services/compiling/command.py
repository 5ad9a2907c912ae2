"""The ``compile`` command."""

import time

from services.commands.options import messages
from services.compiling.building import READY, build, tree_of
from services.compiling.entering import cache_directory


def compile_simulator() -> None:
    """Make machine code of the simulator and the decisions it drives: simulations take about half the time.

    `simulate`, `plan` and `reproduce` use it from then on, until the source changes.
    LAMELLA_COMPILED= (empty) in the environment has them interpreted. It takes a C compiler and mypy."""
    cache = cache_directory()
    if (tree_of(cache) / READY).is_file():
        messages.print(f"compiled already: {tree_of(cache)}", highlight=False, soft_wrap=True)
        return
    began_s = time.monotonic()
    with messages.status("compiling, a minute or two"):
        tree = build(cache)
    messages.print(f"compiled in {time.monotonic() - began_s:.0f} s: {tree}", highlight=False, soft_wrap=True)
