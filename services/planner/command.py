"""The ``plan`` command: from a trace, prices and objectives to ranked deployments."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.errors import ConfigError

if TYPE_CHECKING:
    from services.planner.planning import Plan


def plan(
    model: Annotated[str, typer.Option(help="A shape of the catalogue or a model's directory.")],
    trace: Annotated[Path, typer.Option(help="Whose lengths, and without --rate whose mean rate.")],
    slo: Annotated[str, typer.Option(help="As ttft=0.5,tpot=0.1: seconds, also tbt and e2e.")],
    devices: Annotated[str, typer.Option(help="That may be used, as a100,h100.")] = "a100,h100",
    prices: Annotated[
        Path | None, typer.Option(help="A TOML file of dollars an hour by device; else the catalogue's.")
    ] = None,
    objective: Annotated[str, typer.Option(help="cost, power or throughput.")] = "cost",
    rate: Annotated[float | None, typer.Option(help="Requests a second to serve.")] = None,
    max_gpus: Annotated[int | None, typer.Option(min=1, help="Devices in all, at the most.")] = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet the SLO.")] = 0.9,
    config: Annotated[
        Path | None, typer.Option(help="Settings that all share, [space], and [performance.DEVICE].")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=8, help="Only the trace's first.")] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    processes: Annotated[int | None, typer.Option(min=1, help="Default: one a core.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep what was simulated there, and begin with what is there.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan there.")] = None,
) -> None:
    """Search deployments that keep objectives under a trace, and rank them."""
    from services.planner.run import PlanRequest, make_plan

    request = PlanRequest(
        model=model,
        trace=trace,
        slo=slo,
        devices=devices,
        prices={} if prices is None else read_toml("--prices", prices),
        objective=objective,
        rate_per_s=rate,
        max_devices=max_gpus,
        goal=attainment,
        settings={} if config is None else read_toml("--config", config),
        beside=Path() if config is None else config.parent,
        requests=requests,
        seed=seed,
    )
    found = make_plan(request, processes, checkpoint)
    if json_file is not None:
        from services.planner.report import write_json

        write_json(json_file, found)
    show(found)


def read_toml(option: str, path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(option, str(path), f"cannot be read ({exc.strerror})") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(option, str(path), f"is not TOML: {exc}") from exc


def show(found: "Plan") -> None:
    from rich.console import Console

    from services.planner.report import plan_table, summary_of

    console = Console()
    console.print(plan_table(found))
    for line in summary_of(found):
        console.print(line, highlight=False)
