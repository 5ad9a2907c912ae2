"""All comparisons as one document, computed by several processes at once."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from common.errors import LamellaError
from services.commands.options import messages
from services.reproduce.catalogue import ROWS
from services.reproduce.data import DataFiles
from services.reproduce.measured import LiveRuns
from services.reproduce.row import Row, heading_of, markdown_of

HEAD = """# The papers' headline comparisons, made again

One command each: `lamella reproduce ID --data DIR` prints the paper's figures and ours side by side, what was
run, what is assumed otherwise than there, and why it differs. `lamella reproduce --list` names them and the
files of `DIR` that they read: public data of others, none of it in the package. Where a trace is not in `DIR`
its lengths are drawn from a distribution with the paper's published means, and the row says so. A performance
model that is missing is an error which names it, but one that `--list` calls optional: without it its column
is left out, and the row says so. With `--measured DIR`, a folder of `lamella compare`, rows
that live meshes of one machine can run say what these measured, too. No constant was fitted to a figure of
this page. All of it takes about an hour of CPU time.

This page was written on {day} by

<!-- needs: the papers' data -->
```
lamella reproduce --all --data DIR{options}
```
"""


def list_text(rows: Iterable[Row]) -> str:
    """Each with the files that it reads below it."""
    lines = []
    for row in rows:
        lines.append(f"{row.id}: {row.title} ({row.source})")
        lines += [f"    {file}" for file in row.files]
    return "\n".join(lines)


class Section(NamedTuple):
    """``error``: why its row could not be run, which stands in ``text`` then."""

    text: str
    error: LamellaError | None = None


def section_of(row_id: str, data: Path | None, size: float, live: LiveRuns | None) -> Section:
    row = ROWS[row_id]
    try:
        return Section(markdown_of(row, row.reproduce(DataFiles(data), size, live), size))
    except LamellaError as exc:
        return Section(f"{heading_of(row)}\nCould not be run: {exc}.\n", exc)


def run_rows(
    rows: Sequence[Row], data: Path | None, size: float, workers: int | None, live: LiveRuns | None = None
) -> list[Section]:
    """In their order. What one row cannot be run for leaves the others alone."""
    with (
        ProcessPoolExecutor(workers or os.cpu_count()) as pool,
        Progress(console=messages, transient=True) as bar,
    ):
        task = bar.add_task("reproduce", total=len(rows))
        running = [pool.submit(section_of, row.id, data, size, live) for row in rows]
        for each in as_completed(running):
            each.result()
            bar.advance(task)
    return [each.result() for each in running]


def document_of(sections: Sequence[Section], size: float, day: date, *, has_measured: bool = False) -> str:
    options = " --measured DIR" if has_measured else ""
    options += "" if size == 1.0 else f" --size {size:g}"
    head = HEAD.format(day=day.isoformat(), options=options)
    return "\n".join((head, *[each.text for each in sections]))
