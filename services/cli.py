"""The command line. Every command is a thin door: it reads its options and calls one function elsewhere.

Imports of what a command needs happen inside it, so that ``lamella --help`` is fast and a gateway never
loads torch.
"""

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from common.config_file import load_config
from common.errors import LamellaError
from common.importing import importing
from common.release import installed_version
from services.analysis.command import analyze
from services.analysis.convert_command import convert
from services.bench.command import bench
from services.commands.autoscale import autoscale, relay
from services.commands.mesh import down, status
from services.commands.options import (
    ConfigOption,
    StateDirOfConfig,
    StateOption,
    UrlOption,
    config_of,
    messages,
)
from services.commands.scale import drain, scale
from services.commands.settings import settings
from services.commands.targets import targets
from services.commands.up import up
from services.compare.command import compare
from services.compiling.command import compile_simulator
from services.compiling.entering import begin_compiled
from services.doctor.command import doctor
from services.explaining.command import explain
from services.flip import flip
from services.hosts.roles import ServiceRole
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.length_predictor.command import predictor_app
from services.planner.command import plan
from services.profiling.allocating import begin_as_instances
from services.profiling.command import profile
from services.reproduce.command import reproduce
from services.simulator.command import simulate
from services.top.command import top
from services.tracing.command import trace

app = typer.Typer(
    name="lamella",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(predictor_app, name="predictor")
app.command("up")(up)
app.command("down")(down)
app.command("status")(status)
app.command("top")(top)
app.command("scale")(scale)
app.command("drain")(drain)
app.command("autoscale")(autoscale)
app.command("relay", hidden=True)(relay)
app.command("doctor")(doctor)
app.command("targets")(targets)
app.command("settings")(settings)
app.command("bench")(bench)
app.command("compare")(compare)
app.command("analyze")(analyze)
app.command("simulate")(simulate)
app.command("compile")(compile_simulator)
app.command("reproduce")(reproduce)
app.command("plan")(plan)
app.command("trace")(trace)
app.command("profile")(profile)
app.command("explain")(explain)
app.command("flip")(flip)
app.command("convert")(convert)


DISK_REFUSES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def main() -> None:
    """Runs a command; a LamellaError, or a disk that takes nothing, becomes one line and exit status 1."""
    if sys.argv[1:2] in (["profile"], ["compare"]):
        # Both may compute passes, and say what instances' take.
        begin_as_instances()
    try:
        if sys.argv[1:2] in (["simulate"], ["plan"], ["reproduce"]):
            begin_compiled()
        app()
    except LamellaError as exc:
        _fail(str(exc))
    except OSError as exc:
        if exc.errno not in DISK_REFUSES:
            raise
        _fail(f"{exc.filename or 'writing'}: {exc.strerror}")


def _fail(reason: str) -> NoReturn:
    messages.print("[bold red]error:[/bold red]", end=" ")
    messages.print(reason, highlight=False, markup=False, soft_wrap=True)
    sys.exit(1)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"lamella {installed_version()}")
        raise typer.Exit


@app.callback()
def lamella(
    _: Annotated[
        bool,
        typer.Option("--version", help="Say which this is.", is_eager=True, callback=_say_version),
    ] = False,
) -> None:
    """Serves large language models on disaggregated hardware."""


@app.command()
def serve(role: ServiceRole, config: ConfigOption = None, state_dir: StateDirOfConfig = None) -> None:
    """Run one service in the foreground, anywhere."""
    with importing():
        from common.service import run_process
        from services.hosts.roles import service_of

        service = service_of(role, config_of(config, state_dir))
    sys.exit(run_process(service))


@app.command()
def healthcheck(
    url: Annotated[str | None, typer.Option(help="Default: this machine, $LAMELLA_PORT.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it lives, not whether it is ready.")
    ] = False,
    state_dir: Annotated[Path | None, typer.Option(help="Ask the gateway of the mesh there.")] = None,
) -> None:
    """Exit 0 when a service answers that it is ready: for containers and scripts."""
    from services.healthcheck import is_healthy
    from services.launcher.local import local_url

    if url is None and state_dir is not None:
        url = local_url(state_dir)
    if url is None:
        url = f"http://127.0.0.1:{load_config(None).service.port}"
    sys.exit(0 if is_healthy(url, "live" if live else "ready") else 1)


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask once; without it, converse.")] = None,
    url: UrlOption = None,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    model: str = "default",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    seed: int | None = None,
) -> None:
    """Talk to a model in the terminal, streamed."""
    from services.chat import ChatOptions
    from services.chat import chat as converse
    from services.launcher.local import local_url

    api_key = os.environ.get("OPENAI_API_KEY")
    options = ChatOptions(url or local_url(state_dir), model, system, max_tokens, temperature, seed, api_key)
    asyncio.run(converse(options, question, Console()))


@model_app.command("path")
def model_path(config: ConfigOption = None, state_dir: StateDirOfConfig = None) -> None:
    """Print the served model's directory (converts the default model the first time)."""
    from services.model_directory import model_directory

    with messages.status("default model") as status:
        directory = model_directory(
            config_of(config, state_dir).model, lambda stage: status.update(f"default model: {stage}")
        )
    print(directory)


if __name__ == "__main__":
    main()
