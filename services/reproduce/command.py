"""The ``reproduce`` command: a paper's headline comparison, theirs and ours side by side."""

from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError

DOCUMENT = Path("docs/reproduction.md")
EXIT_NOT_RUN = 1


def reproduce(
    comparison: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Which one: `--list` has them. `tetriinfer-fig11-15` is several."
        ),
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
    measured: Annotated[
        Path | None,
        typer.Option(
            help="A folder of `lamella compare bench/comparison.toml`: what live meshes measured, too,"
            " against its `coupled` or `coupled-prefill-first`."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --all: processes at once. Default: one a core.")
    ] = None,
) -> None:
    """Make a paper's headline comparison again: its figures beside ours."""
    from rich.markdown import Markdown

    from services.commands.options import messages
    from services.output_files import check_writable
    from services.printing import output_console
    from services.reproduce.catalogue import ROWS, rows_of
    from services.reproduce.data import DataFiles
    from services.reproduce.document import document_of, list_text, run_rows
    from services.reproduce.measured import LiveRuns
    from services.reproduce.row import markdown_of

    console = output_console()
    if sum((list_all, run_all, comparison is not None)) != 1:
        raise ConfigError("ID", comparison, "give one comparison's id, or --list, or --all")
    if list_all:
        typer.echo(list_text(ROWS.values()))
        return
    files = DataFiles(data)
    live = None if measured is None else LiveRuns(measured)
    if run_all:
        check_writable("--output", output)
        sections = run_rows(list(ROWS.values()), data, size, workers, live)
        text = document_of(sections, size, date.today(), has_measured=live is not None)
        output.write_text(text, encoding="utf-8")
        console.print(f"{len(sections)} comparisons: {output}", highlight=False)
        errors = [each.error for each in sections if each.error is not None]
        for error in errors:
            messages.print(f"not run: {error}", highlight=False)
        if errors:
            raise typer.Exit(EXIT_NOT_RUN)
        return
    assert comparison is not None
    rows = rows_of(comparison)
    if live is not None and not any(row.measured for row in rows):
        have = ", ".join(row.id for row in ROWS.values() if row.measured)
        raise ConfigError("--measured", str(measured), f"is of {have}: {comparison} needs other hardware")
    if live is not None and not any(row.measured and row.measured(live) for row in rows):
        rule = f"has no runs of a coupled and another configuration that {comparison} could show"
        raise ConfigError("--measured", str(measured), rule)
    for row in rows:
        with messages.status(row.id):
            found = row.reproduce(files, size, live)
        console.print(Markdown(markdown_of(row, found, size)))
