"""The ``simulate`` command: a configuration and a trace to latencies, in virtual time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from services.simulator.metrics import Metrics


def simulate(
    config: Annotated[Path, typer.Argument(help="A TOML file: [cluster], [[pool]] and a mesh's settings.")],
    trace: Annotated[Path, typer.Option(help="Whose lengths, and without --rate whose arrivals.")],
    rate: Annotated[float | None, typer.Option(help="Requests a second; else the trace's own times.")] = None,
    arrivals: Annotated[str, typer.Option(help="With --rate: poisson or fixed.")] = "poisson",
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the trace's first.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="That every client allows; else just what it will draw.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often a client asks again that is refused.")] = 0,
    slo: Annotated[str | None, typer.Option(help="As ttft=0.5,tpot=0.1: say how many meet it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured there.")] = None,
) -> None:
    """Simulate a mesh under a trace, with the decisions that run live."""
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from services.bench.config import parse_objectives
    from services.bench.traces import read_trace
    from services.commands.options import messages
    from services.simulator.config import load_simulated
    from services.simulator.metrics import measure
    from services.simulator.run import Load, offered_of
    from services.simulator.run import simulate as run

    simulated, objectives = load_simulated(config), None if slo is None else parse_objectives(slo)
    rows = read_trace(trace, requests)
    load = Load(offered_of(rows, rate, arrivals, seed), max_tokens, retries)
    with Progress(console=messages, transient=True) as bar:
        task = bar.add_task("requests", total=len(rows.requests))
        cluster = run(simulated, load, lambda come: bar.update(task, completed=come))
    metrics = measure(cluster, objectives)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(metrics), indent=2) + b"\n")
    console = Console()
    console.print(latency_table(metrics))
    console.print(pool_table(metrics))
    for line in summary_of(metrics):
        console.print(line, highlight=False)


def summary_of(metrics: "Metrics") -> list[str]:
    lines = [
        f"{metrics.done} of {metrics.requests} requests done, {metrics.rejected} rejected, {metrics.failed}"
        f" failed, {metrics.continued} continuations, in {metrics.elapsed_s:.1f} virtual seconds:"
        f" {metrics.requests_per_s:.2f} requests/s, {metrics.tokens_per_s:.0f} tokens/s"
    ]
    if metrics.attainment is not None and metrics.goodput_per_s is not None:
        share = metrics.attainment.share
        lines.append(f"{share:.1%} met every objective: goodput {metrics.goodput_per_s:.2f} requests/s")
    lines.append(f"records {metrics.digest[:16]}")
    return lines


def latency_table(metrics: "Metrics") -> "Table":
    from rich.table import Table

    table = Table("ms", "mean", "p50", "p90", "p95", "p99", "max", box=None)
    for name, spread in (
        ("TTFT", metrics.ttft),
        ("TPOT", metrics.tpot),
        ("second token", metrics.second_token),
        ("slowest gap", metrics.slowest_gap),
        ("queue", metrics.queue),
        ("end to end", metrics.end_to_end),
    ):
        if spread is None:
            table.add_row(name, *["-"] * 6)
            continue
        values = (
            spread.mean_s,
            spread.p50_s,
            spread.p90_s,
            spread.p95_s,
            spread.p99_s,
            spread.maximum_s,
        )
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in values))
    if metrics.tbt_s:
        table.add_row("TBT", "-", *(f"{1e3 * value:.1f}" for value in metrics.tbt_s), "-")
    return table


def pool_table(metrics: "Metrics") -> "Table":
    from rich.table import Table

    table = Table("pool", "role", "instances", "busy", "batch", "KV peak", "preempted", "sent GB", box=None)
    for pool in metrics.pools:
        table.add_row(
            pool.name,
            pool.role,
            str(pool.instances),
            f"{pool.busy:.1%}",
            f"{pool.batch:.1f}",
            f"{pool.kv_peak:.1%}",
            str(pool.preempted),
            f"{pool.sent_bytes / 1e9:.1f}",
        )
    return table
