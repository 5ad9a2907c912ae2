"""The ``top`` command: the mesh in a terminal, once a second until Ctrl-C."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from common.errors import LamellaError, LauncherError
from common.messages import MemberRecord, ServiceRecord
from gateway.private.latency_view import LatencyView
from gateway.private.mesh_view import MeshView
from services.asking import ask_service
from services.commands.options import ConfigOption, UrlOption
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.members import members_of
from services.printing import output_console
from services.server_url import parse_url
from services.top.screen import screen
from services.tracing.command import mesh_of

EVERY_S = 1.0


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

    console = output_console()

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
    """Raises LauncherError, StoreError."""
    return private_url_of(asyncio.run(members_of(mesh_of(state_dir, config, None, None))))


def private_url_of(members: Iterable[MemberRecord]) -> str:
    """Of the first gateway that says it. Raises LauncherError."""
    gateways = [each for each in members if isinstance(each, ServiceRecord) and each.kind == "gateway"]
    if not gateways:
        raise LauncherError("no gateway is registered: without one nobody looks at the mesh")
    found = next((each.private_url for each in gateways if each.private_url is not None), None)
    if found is None:
        raise LauncherError(
            f"{', '.join(each.service_id for each in gateways)}: registered without a private port, as older"
            " gateways are; `lamella top --url` asks one that you know"
        )
    return found


def _look(url: str) -> Group:
    """Raises LauncherError."""
    return screen(ask_service(f"{url}/api/mesh", MeshView), ask_service(f"{url}/api/latency", LatencyView))


def _old(shown: RenderableType, error: LamellaError) -> Group:
    """What was known last, and why no more is."""
    return Group(Text(f"what is shown is old: {error}", "bold red"), "", shown)
