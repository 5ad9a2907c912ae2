"""The ``top`` command: the mesh in a terminal, once a second until Ctrl-C."""

import asyncio
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from common.errors import LamellaError, LauncherError
from common.messages import ServiceRecord
from gateway.private.latency_view import LatencyView
from gateway.private.mesh_view import MeshView
from services.commands.options import ConfigOption, UrlOption
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.members import members_of
from services.server_url import parse_url
from services.top.screen import screen
from services.tracing.command import mesh_of

View = TypeVar("View")

EVERY_S = 1.0
TIMEOUT_S = 5.0
FILE_WIDTH = 160


def top(
    url: UrlOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once. So does output that is no terminal.")
    ] = False,
    state_dir: Annotated[Path, typer.Option(help="Of the mesh that runs there.")] = DEFAULT_STATE_DIRECTORY,
    config: ConfigOption = None,
) -> None:
    """Show who runs, how loaded it is and how fast it answers, as a gateway's private port tells it."""
    from services.launcher.local import ended_by_any_signal

    # Whoever reads it from a file has no edge to care for.
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)

    def look() -> Group:
        return _look(_private_url(state_dir, config) if url is None else parse_url(url).base_url)

    shown = look()
    if once or not console.is_terminal:
        console.print(shown, highlight=False)
        return
    try:
        with ended_by_any_signal(), Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(EVERY_S)
                try:
                    shown = look()
                    live.update(shown, refresh=True)
                except LamellaError as exc:
                    live.update(_old(shown, exc), refresh=True)
    except KeyboardInterrupt:
        return


def _private_url(state_dir: Path, config: Path | None) -> str:
    """Of the first gateway that says it. Raises LauncherError, StoreError."""
    members = asyncio.run(members_of(mesh_of(state_dir, config, None, None)))
    services = [each for each in members if isinstance(each, ServiceRecord)]
    found = next((each.private_url for each in services if each.private_url is not None), None)
    if found is None:
        raise LauncherError("no gateway is registered: without one nobody looks at the mesh")
    return found


def _look(url: str) -> Group:
    """Raises LauncherError."""
    return screen(_ask(f"{url}/api/mesh", MeshView), _ask(f"{url}/api/latency", LatencyView))


def _ask(url: str, kind: type[View]) -> View:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=kind)
    except (urllib.error.URLError, OSError) as exc:
        raise LauncherError(f"{url} does not answer: {exc}") from exc
    except msgspec.DecodeError as exc:
        raise LauncherError(f"{url} is no gateway's private port: {exc}") from exc


def _old(shown: RenderableType, error: LamellaError) -> Group:
    """What was known last, and why no more is."""
    return Group(Text(f"what is shown is old: {error}", "bold red"), "", shown)
