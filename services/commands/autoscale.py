"""The commands ``autoscale``, and ``relay``, which it runs inside the mesh."""

import asyncio
from typing import Annotated

import typer

from common.config_file import load_config
from services.commands.options import ConfigOption, StateOption
from services.commands.scale import NamespaceOption, TargetOption
from services.connectors.targets import connector_of
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY


def autoscale(
    target: TargetOption = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would change, and why.")
    ] = False,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    namespace: NamespaceOption = "lamella",
) -> None:
    """Make a mesh follow its scheduler's plans, and what operators wish on the page, until Ctrl-C."""
    from common.logs import configure_terminal_logging
    from services.autoscaling.follow import autoscale as follow
    from services.launcher.autoscale import log

    configure_terminal_logging(informative=log.name)

    async def run() -> None:
        await follow(await connector_of(target, state_dir, namespace), is_dry_run=dry_run)

    asyncio.run(run())


def relay(
    wishes: Annotated[bool, typer.Option("--wishes", help="Also take up what operators wish.")] = False,
    config: ConfigOption = None,
) -> None:
    """Say as JSON lines what is planned and wished here: what `lamella autoscale` reads."""
    from common.errors import first_reason
    from common.logs import configure_terminal_logging
    from services.autoscaling.relay import run_relay
    from services.launcher.wish_calls import log

    configure_terminal_logging(informative=log.name)
    try:
        asyncio.run(run_relay(load_config(config), takes_wishes=wishes))
    except BaseExceptionGroup as group:
        raise first_reason(group) from group
