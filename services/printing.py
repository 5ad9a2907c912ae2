"""Where commands print what they were asked for."""

import os
import sys

from rich.console import Console

FILE_WIDTH = 160


def output_console(*, has_markup: bool = True) -> Console:
    """As wide as the terminal. Whoever reads it from a file or a pipe has no edge to care for: unless COLUMNS
    says how wide it is to be, no table is cut at the 80 columns of a terminal that is not there.
    ``has_markup``: else brackets are what they are, as in names of files, pools and tables."""
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console(width=None if has_width else FILE_WIDTH, markup=has_markup)
