"""The ``compare`` command. It starts meshes of its own; ``bench`` measures one that runs."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError


def compare(
    file: Annotated[Path, typer.Argument(help="Workloads and configurations, as bench/comparison.toml.")],
    output: Annotated[Path, typer.Option(help="A folder; what it holds already is not run again.")],
    workload: Annotated[list[str] | None, typer.Option(help="Only this one, and others so named.")] = None,
    configuration: Annotated[
        list[str] | None, typer.Option(help="Only this one, and others so named.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How often; default: what the file says.", min=1)] = None,
    limit_s: Annotated[
        float | None, typer.Option(help="Begin nothing that would probably end later than that.", min=1.0)
    ] = None,
    simulates: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Simulate the runs of these configurations, too, and say how far that is off."
        ),
    ] = False,
) -> None:
    """Send the same requests at the same times through differently configured meshes, in turn.

    Writes runs.jsonl, table.md, picture.svg and each mesh's logs into the folder; with --simulate
    simulated.md, too, of the configurations that were asked for.
    """
    import msgspec
    from rich.console import Console

    from services.compare.comparison import check_calibration, choose, read_comparison
    from services.compare.figures import make_cells, markdown_table
    from services.compare.picture import draw_comparison
    from services.compare.run import run_comparison

    console = Console(stderr=True)
    comparison = read_comparison(file)
    if rounds is not None:
        comparison = msgspec.structs.replace(comparison, rounds=rounds)
    chosen = choose(comparison, workload or (), configuration or ())
    if simulates:
        check_calibration(comparison)
    folder = output.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError("--output", str(output), f"cannot be made ({exc.strerror})") from exc
    try:
        records = run_comparison(
            comparison, chosen, folder, limit_s, lambda line: console.print(line, highlight=False)
        )
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it was", highlight=False)
        raise SystemExit(128 + signal.SIGINT) from None
    cells = make_cells(comparison, records)
    table = markdown_table(comparison, cells)
    (folder / "table.md").write_text(table)
    draw_comparison(folder / "picture.svg", comparison, cells)
    print(table, end="")
    if simulates:
        from services.compare.between import read_between
        from services.compare.error_table import describe_overheads, errors_table
        from services.compare.simulated import Simulation

        names = {each.name for each in chosen.configuration}
        own = [each for each in records if each.configuration in names]
        others = [each for each in records if each.configuration not in names]
        between = read_between(comparison, chosen.configuration, folder, own)
        overheads, pairs = Simulation(comparison, between).pairs(own, others)
        text = errors_table(pairs, comparison.fitted, between)
        (folder / "simulated.md").write_text(text)
        console.print(describe_overheads(overheads), highlight=False)
        print(text, end="")
