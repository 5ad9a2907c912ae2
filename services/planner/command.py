"""The ``plan`` command: from requests, prices and objectives to ranked deployments."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.errors import ConfigError
from services.commands.options import (
    BURSTINESS,
    LengthScaleOption,
    OutputTokensOption,
    PromptTokensOption,
    WorkloadOption,
)

if TYPE_CHECKING:
    from services.planner.candidates import PoolPlan
    from services.planner.planning import Plan
    from services.planner.preparing import PlanRequest
    from services.planner.searches import SearchName, SearchReport

EXIT_NOTHING_FOUND = 1


def plan(
    model: Annotated[str, typer.Option(help="A shape of the catalogue or a model's directory.")],
    slo: Annotated[
        str | None,
        typer.Option(help="As ttft=0.5,tpot=0.1: seconds, also tbt and e2e. Not needed with splitwise."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Whose lengths, and without --rate whose mean rate.")
    ] = None,
    workload: WorkloadOption = None,
    length_scale: LengthScaleOption = 1.0,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    devices: Annotated[str, typer.Option(help="That may be used, as a100,h100.")] = "a100,h100",
    device_file: Annotated[
        Path | None, typer.Option(help="A TOML file of [\\[device]] tables: yours beside the catalogue's.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="A TOML file of dollars an hour by device; else the catalogue's.")
    ] = None,
    objective: Annotated[str, typer.Option(help="cost, power or throughput.")] = "cost",
    rate: Annotated[float | None, typer.Option(help="Requests a second to serve.")] = None,
    burstiness: Annotated[float, typer.Option(help=BURSTINESS)] = 1.0,
    max_gpus: Annotated[int | None, typer.Option(min=1, help="Devices in all, at the most.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="Dollars an hour of all, at the most.")] = None,
    max_power: Annotated[float | None, typer.Option(help="Watts that all are rated at, at the most.")] = None,
    attainment: Annotated[
        float | None, typer.Option(help="Share of requests that must meet the SLO: 0.9 without.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings that all share, \\[space], and \\[performance.DEVICE].")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=8, help="Only the trace's first; how many are drawn.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of drawn lengths, and of arrivals.")] = 0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Default, and at the most: one a core.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep what was simulated there, and begin with what is there.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="A paper's instead: distserve-high, distserve-low, vidur, splitwise, aladdin, lamina."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw vidur's Pareto fronts: .png, .svg, .pdf.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the best one's files: settings, compose, Kubernetes.")
    ] = None,
    choose: Annotated[
        int | None, typer.Option(help="With --out: which of the ranked ones, else the first.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was found there.")] = None,
) -> None:
    """Search deployments that keep objectives under a trace or drawn requests, and rank them. Exit status 1
    without --search: none does."""
    from common.config_file import read_toml
    from services.planner.preparing import DEFAULT_GOAL, PlanRequest
    from services.planner.report import file_of, write_json
    from services.planner.run import make_plan
    from services.simulator.devices import read_device_file
    from services.simulator.requested import Requested

    check_files(json_file, plot, out, search)
    check_choice(choose, out, search)
    check_objectives(slo, attainment, search)
    request = PlanRequest(
        model=model,
        requested=Requested(trace, requests, workload, length_scale, prompt_tokens, output_tokens),
        slo=slo,
        devices=devices,
        catalogue=read_device_file(device_file),
        prices={} if prices is None else read_toml("--prices", prices),
        objective=objective,
        rate_per_s=rate,
        max_devices=max_gpus,
        max_usd_h=max_cost,
        max_power_w=max_power,
        goal=DEFAULT_GOAL if attainment is None else attainment,
        settings={} if config is None else read_toml("--config", config),
        beside=Path() if config is None else config.parent,
        seed=seed,
        burstiness=burstiness,
        has_reference=search == "splitwise",
        ends_early=search not in ("splitwise", "vidur"),
        has_attention=search is None,
        is_simulated=search != "lamina",
    )
    if search is not None:
        report = run_search(search, request, processes, checkpoint, json_file, plot)
        if out is not None:
            write_files(report.chosen, request, out)
        return
    found = make_plan(request, processes, checkpoint)
    show(found)
    if json_file is not None:
        write_json(json_file, file_of(found))
    if out is not None:
        write_files(chosen_of(found, choose), request, out)
    if not found.ranked:
        raise typer.Exit(EXIT_NOTHING_FOUND)


def chosen_of(found: "Plan", choose: int | None) -> "Sequence[PoolPlan]":
    """None where nothing was found. Raises ConfigError."""
    if not found.ranked:
        return ()
    if choose is not None and choose > len(found.ranked):
        raise ConfigError(
            "--choose",
            choose,
            f"must be 1 to {len(found.ranked)}, as many as were found: no files are written",
        )
    return found.ranked[(choose or 1) - 1].deployment.pools


def write_files(pools: "Sequence[PoolPlan]", request: "PlanRequest", directory: Path) -> None:
    """Raises ConfigError where there is nothing to make them of."""
    from services.planner.files import files_of_others, notes_of, write_deployment
    from services.planner.preparing import prepare
    from services.printing import output_console

    if not pools:
        raise ConfigError("--out", str(directory), "is not written: no such deployment was found")
    console = output_console(has_markup=False)
    written = write_deployment(pools, prepare(request).conditions, directory)
    console.print(
        f"written to {directory}: {', '.join(str(each.relative_to(directory)) for each in written)}"
    )
    if others := files_of_others(pools, directory):
        names = ", ".join(str(each.relative_to(directory)) for each in others)
        console.print(f"note: {names} are of another deployment that was written there", highlight=False)
    for note in notes_of(pools):
        console.print(f"note: {note}", highlight=False)


def run_search(
    name: str,
    request: "PlanRequest",
    processes: int | None,
    checkpoint: Path | None,
    json_file: Path | None,
    plot: Path | None,
) -> "SearchReport":
    from services.planner.report import search_table, write_json
    from services.planner.run import make_search
    from services.printing import output_console

    found = make_search(known_search(name), request, processes, checkpoint)
    console = output_console(has_markup=False)
    console.print(search_table(found))
    for line in found.lines:
        console.print(line, highlight=False)
    if json_file is not None:
        write_json(json_file, found)
    if plot is not None and request.slo is not None:
        from services.bench.config import parse_objectives
        from services.planner.vidur_picture import draw_pareto

        draw_pareto(plot, found.vidur, parse_objectives(request.slo))
    return found


def known_search(name: str) -> "SearchName":
    """Raises ConfigError."""
    from services.planner.searches import SEARCHES

    known = next((each for each in SEARCHES if each == name), None)
    if known is None:
        raise ConfigError("--search", name, f"must be one of {', '.join(SEARCHES)}")
    return known


def check_files(json_file: Path | None, plot: Path | None, out: Path | None, search: str | None) -> None:
    """Before anything is run for nothing. Raises ConfigError."""
    from services.output_files import check_folder, check_writable

    if json_file is not None:
        check_writable("--json", json_file)
    if plot is not None:
        check_picture(plot, search)
    if out is not None:
        if search == "lamina":
            raise ConfigError(
                "--out",
                str(out),
                "cannot be written with --search lamina: it finds ratios, not how many instances there are",
            )
        check_folder("--out", out)


def check_objectives(slo: str | None, attainment: float | None, search: str | None) -> None:
    """Raises ConfigError where some are needed, and for what the search does not look at."""
    if slo is None and search != "splitwise":
        raise ConfigError("--slo", None, "is needed: objectives, as ttft=0.5,tpot=0.1")
    if attainment is None or search is None:
        return
    from services.planner.searches import NO_ATTAINMENT

    if (why := NO_ATTAINMENT.get(known_search(search))) is not None:
        raise ConfigError("--attainment", attainment, f"is not looked at with --search {search}: {why}")


def check_picture(path: Path, search: str | None) -> None:
    """Raises ConfigError."""
    from services.simulator.output_files import check_plot

    if search != "vidur":
        raise ConfigError("--plot", str(path), "is of --search vidur")
    check_plot(path)


def check_choice(choose: int | None, out: Path | None, search: str | None) -> None:
    """Raises ConfigError."""
    if choose is None:
        return
    if choose < 1:
        raise ConfigError("--choose", choose, "must be 1 or more")
    if search is not None:
        raise ConfigError("--choose", choose, f"is of what is ranked without --search {search}")
    from services.planner.planning import MOST_RANKED

    if choose > MOST_RANKED:
        raise ConfigError("--choose", choose, f"must be 1 to {MOST_RANKED}: no plan ranks more")
    if out is None:
        raise ConfigError("--choose", choose, "says of which one --out is to write files: it is needed, too")


def show(found: "Plan") -> None:
    from services.planner.report import plan_table, summary_of
    from services.printing import output_console

    console = output_console(has_markup=False)
    console.print(plan_table(found))
    for line in summary_of(found):
        console.print(line, highlight=False)
