"""The ``simulate`` command: a configuration and requests to latencies, in virtual time."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
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
    messages,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from services.simulator.config import Simulated
    from services.simulator.tables import Run


def simulate(
    config: Annotated[Path, typer.Argument(help="A TOML file: a cluster, its pools and a mesh's settings.")],
    trace: Annotated[
        Path | None, typer.Option(help="Whose lengths, and without --rate whose arrivals.")
    ] = None,
    workload: WorkloadOption = None,
    length_scale: LengthScaleOption = 1.0,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Another configuration, for the same requests. Repeatable.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second; else the trace's own times.")] = None,
    trace_scale: Annotated[
        float, typer.Option(help="Replay the trace's arrivals so many times as fast.")
    ] = 1.0,
    arrivals: Annotated[str | None, typer.Option(help="With --rate: poisson, the default, or fixed.")] = None,
    burstiness: Annotated[float | None, typer.Option(help=BURSTINESS)] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of drawn lengths, of arrivals, and of what befalls the mesh.")
    ] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only the trace's first; how many are drawn.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="That every client allows; else just what it will draw.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often a client asks again that is refused.")] = 0,
    slo: Annotated[str | None, typer.Option(help="As ttft=0.5,tpot=0.1: say how many meet it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured there.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a row for every request.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="The same; needs the extra `parquet`.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what everyone did when there, as `lamella trace` does.")
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Say what each operator of the model took.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and who waits: .png, .svg, .pdf.")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Say how far fitted times are off where nothing was fitted.")
    ] = False,
) -> None:
    """Simulate a mesh under a trace or drawn requests, with the decisions that run live."""
    from rich.progress import Progress

    from common.config_file import told_of
    from services.bench.arrivals import POISSON_BURSTINESS
    from services.bench.config import parse_objectives
    from services.simulator.config import load_simulated
    from services.simulator.metrics import measure
    from services.simulator.output_files import OutputFiles
    from services.simulator.requested import Requested, requests_of
    from services.simulator.run import Load, check_rate, check_span, offered_of
    from services.simulator.run import simulate as run
    from services.simulator.tables import Run

    files = [config, *(compare or [])]
    names = names_of(files)
    output = OutputFiles(json_file, csv_file, parquet, plot, timeline)
    output.check(len(files))
    # A mistake in the last one is told before the first one is run.
    simulated = [load_simulated(each) for each in files]
    objectives = None if slo is None else parse_objectives(slo)
    check_scale(trace_scale, trace, rate)
    check_arrivals(arrivals, rate, burstiness)
    if rate is not None:
        check_rate(rate)
    requested = Requested(trace, requests, workload, length_scale, prompt_tokens, output_tokens)
    rows = requests_of(requested, seed)
    if rate is None and not rows.has_arrivals:
        raise ConfigError("--rate", None, "is needed: the requests have lengths alone, no arrivals")
    if rate is None:
        check_span(trace_scale, rows)
    runs: list[Run] = []
    with Progress(console=messages, transient=True) as bar:
        for path, name, one in zip(files, names, simulated, strict=True):
            task = bar.add_task(name, total=len(rows.requests))
            drawn = (arrivals or "poisson", seed, trace_scale, burstiness or POISSON_BURSTINESS)
            load = Load(offered_of(rows, rate, *drawn), max_tokens, retries)
            shown = partial(_show_progress, bar, task, name)
            with told_of(path):
                cluster = run(one, load, shown, output.recorded, seed, has_operators=operators)
            runs.append(Run(name, measure(cluster, objectives)))
            output.take(name, cluster)
    show(runs, has_operators=operators)
    output.write(runs, objectives)
    if held_out:
        for each in simulated:
            show_held_out(each)


def _show_progress(bar: "Progress", task: "TaskID", name: str, come: int, now_s: float) -> None:
    """With the virtual time: amid hours without requests that alone goes on."""
    bar.update(task, completed=come, description=f"{name}, {timedelta(seconds=round(now_s))} simulated")


def check_scale(trace_scale: float, trace: Path | None, rate: float | None) -> None:
    """Raises ConfigError."""
    if not 0.0 < trace_scale < float("inf"):
        raise ConfigError("--trace-scale", trace_scale, "must be a positive number")
    if trace_scale != 1.0 and trace is None:
        raise ConfigError("--trace-scale", trace_scale, "is of the arrivals of --trace")
    if trace_scale != 1.0 and rate is not None:
        raise ConfigError("--trace-scale", trace_scale, "is of the trace's own arrivals: leave --rate out")


def check_arrivals(arrivals: str | None, rate: float | None, burstiness: float | None) -> None:
    """Raises ConfigError."""
    from services.bench.arrivals import ARRIVAL_PROCESSES, check_burstiness

    if burstiness is not None:
        check_burstiness(burstiness, arrivals or "poisson")
        if rate is None:
            raise ConfigError("--burstiness", burstiness, "is of the arrivals at a --rate")
    if arrivals is None:
        return
    if arrivals not in ARRIVAL_PROCESSES:
        raise ConfigError("--arrivals", arrivals, f"must be one of {', '.join(ARRIVAL_PROCESSES)}")
    if rate is None:
        raise ConfigError("--arrivals", arrivals, "is of --rate: without it requests come as in the trace")


def show_held_out(simulated: "Simulated") -> None:
    """Each source as soon as it is known: a forest takes a minute."""
    from services.printing import output_console
    from services.simulator.tables import held_out_text, pools_by_source

    console = output_console(has_markup=False)
    for pools in pools_by_source(simulated):
        console.print(held_out_text(pools), highlight=False)


def names_of(files: Sequence[Path]) -> list[str]:
    """File names alone where they differ, else the files as they were given. Raises ConfigError."""
    for each in files:
        if files.count(each) > 1:
            raise ConfigError("--compare", str(each), "is given already")
    names = [each.stem for each in files]
    return names if len(set(names)) == len(names) else [str(each) for each in files]


def show(runs: "Sequence[Run]", *, has_operators: bool = False) -> None:
    from services.printing import output_console
    from services.simulator.tables import (
        change_table,
        comparison_tables,
        hardware_table,
        latency_table,
        operator_table,
        pool_table,
        summary_of,
    )

    console = output_console(has_markup=False)
    for run in runs:
        if len(runs) > 1:
            console.rule(run.name, align="left")
        metrics = run.metrics
        tables = [latency_table(metrics), pool_table(metrics), hardware_table(metrics.hardware)]
        if metrics.operators:
            tables.append(operator_table(metrics.operators))
        if metrics.changes:
            tables.append(change_table(metrics.changes))
        for table in tables:
            console.print(table)
            console.print()
        if has_operators and not metrics.operators:
            console.print("no pool's source of performance tells operators apart: roofline, vidur,")
            console.print("operators and aiconfigurator do")
        for line in summary_of(metrics):
            console.print(line, highlight=False)
    if len(runs) > 1:
        console.rule("side by side", align="left")
        for table in comparison_tables(runs, console):
            console.print(table)
