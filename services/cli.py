"""The command line. Every command is a thin door: it reads its options and calls one function elsewhere.

Imports of what a command needs happen inside it, so that ``lamella --help`` is fast and a gateway never
loads torch.
"""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from common.config import load_config
from common.errors import LamellaError
from services.roles import ServiceRole

app = typer.Typer(
    name="lamella",
    help="Serves large language models on disaggregated hardware.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")

errors = Console(stderr=True)

ConfigOption = Annotated[Optional[Path], typer.Option("--config", help="A TOML file of settings.")]  # noqa: UP045
UrlOption = Annotated[Optional[str], typer.Option("--url", help="The server to talk to.")]  # noqa: UP045


def main() -> None:
    """Runs a command; a LamellaError becomes one line and exit status 1."""
    try:
        app()
    except LamellaError as exc:
        errors.print(f"[bold red]error:[/bold red] {exc}", highlight=False, markup=True)
        sys.exit(1)


@app.command()
def serve(role: ServiceRole, config: ConfigOption = None) -> None:
    """Run one service in the foreground, anywhere: gateway, scheduler, prefill or decode."""
    from common.service import run_process
    from services.roles import service_of

    sys.exit(run_process(service_of(role, load_config(config))))


@app.command()
def healthcheck(
    url: Annotated[Optional[str], typer.Option(help="Default: this machine, $LAMELLA_PORT.")] = None,  # noqa: UP045
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it lives, not whether it is ready.")
    ] = False,
) -> None:
    """Exit 0 when a service answers that it is ready: for containers and scripts."""
    from services.healthcheck import is_healthy

    port = load_config(None).service.port
    base = url or f"http://127.0.0.1:{port}"
    sys.exit(0 if is_healthy(base, "live" if live else "ready") else 1)


@app.command()
def chat(
    question: Annotated[Optional[str], typer.Argument(help="Ask once; without it, converse.")] = None,  # noqa: UP045
    url: UrlOption = None,
    state_dir: Annotated[Path, typer.Option(help="The local mesh to talk to, without --url.")] = Path(
        ".lamella"
    ),
    model: str = "default",
    system: Annotated[Optional[str], typer.Option(help="A system message.")] = None,  # noqa: UP045
    max_tokens: Annotated[Optional[int], typer.Option(min=1)] = None,  # noqa: UP045
    temperature: Annotated[Optional[float], typer.Option(min=0, max=2)] = None,  # noqa: UP045
    seed: Optional[int] = None,  # noqa: UP045
) -> None:
    """Talk to a model in the terminal, streamed."""
    from services.chat import ChatOptions
    from services.chat import chat as converse

    options = ChatOptions(url or _local_url(state_dir), model, system, max_tokens, temperature, seed)
    asyncio.run(converse(options, question, Console()))


@model_app.command("path")
def model_path(config: ConfigOption = None) -> None:
    """Print the served model's directory (converts the default model the first time)."""
    from services.model_directory import model_directory

    with errors.status("default model") as status:
        directory = model_directory(
            load_config(config).model, lambda stage: status.update(f"default model: {stage}")
        )
    print(directory)


def _local_url(state_dir: Path) -> str:
    from services.local import mesh_status

    return mesh_status(state_dir).url


if __name__ == "__main__":
    main()
