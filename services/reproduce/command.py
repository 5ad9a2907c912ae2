"""The ``reproduce`` command: a paper's headline comparison, theirs and ours side by side."""

from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError

DOCUMENT = Path("docs/reproduction.md")


def reproduce(
    comparison: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Which one: `--list` has them.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The directory that has the papers' public data.")] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Say which there are, and what each reads.")
    ] = False,
    run_all: Annotated[bool, typer.Option("--all", help="Run all of them, and write the document.")] = False,
    output: Annotated[Path, typer.Option(help="With --all: the document to write.")] = DOCUMENT,
    size: Annotated[
        float, typer.Option(min=0.001, max=10.0, help="Times the usual number of requests.")
    ] = 1.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --all: processes at once. Default: one a core.")
    ] = None,
) -> None:
    """Make a paper's headline comparison again: its figures beside ours."""
    from rich.console import Console
    from rich.markdown import Markdown

    from services.output_files import check_writable
    from services.reproduce.catalogue import ROWS
    from services.reproduce.data import DataFiles
    from services.reproduce.document import document_of, list_text, run_rows
    from services.reproduce.row import markdown_of

    console = Console()
    chosen = [list_all, run_all, comparison is not None]
    if sum(chosen) != 1:
        raise ConfigError("ID", comparison, "give one comparison's id, or --list, or --all")
    if list_all:
        typer.echo(list_text(ROWS.values()))
        return
    files = DataFiles(data)
    if run_all:
        check_writable("--output", output)
        sections = run_rows(list(ROWS.values()), data, size, workers)
        output.write_text(document_of(sections, size, date.today()), encoding="utf-8")
        console.print(f"{len(sections)} comparisons: {output}", highlight=False)
        return
    if comparison not in ROWS:
        raise ConfigError("ID", comparison, f"must be one of {', '.join(ROWS)}")
    row = ROWS[comparison]
    console.print(Markdown(markdown_of(row, row.run(files, size), size)))
