"""The commands ``scale`` and ``drain``: more or fewer processes, wherever the mesh runs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from common.errors import LauncherError
from services.commands.mesh import print_plan
from services.commands.options import StateOption, messages
from services.connectors.connector import Standing
from services.connectors.targets import Target, connector_of
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.launcher.wishes import LastOfPhase, RoleChange, parse_wishes, say_change, say_count

TargetOption = Annotated[
    Target,
    typer.Option(
        help="Where the mesh runs: by `lamella up` on this machine, under docker compose in this directory,"
        " or in kubectl's current context. auto: the first of the former two."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Also end the last instance that prefills, or decodes."),
]
NamespaceOption = Annotated[str, typer.Option(help="With --target kubernetes.")]


def scale(
    counts: Annotated[
        list[str] | None, typer.Argument(metavar="ROLE=N …", help="For example prefill=2 decode=+1.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show how many run, and the scheduler's plan; change nothing.")
    ] = False,
    force: ForceOption = False,
    target: TargetOption = "auto",
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    namespace: NamespaceOption = "lamella",
) -> None:
    """Change how many processes of a role run; returns when they are ready and the surplus has drained."""
    if show and counts:
        raise LauncherError("--show changes nothing: leave the counts away")
    if show:
        _print_standing(asyncio.run(_standing(target, state_dir, namespace)))
        return
    if not counts:
        raise LauncherError("say how many of what, for example decode=2 or decode=+1, or --show")
    wishes = parse_wishes(counts)

    async def carry_out() -> list[RoleChange]:
        connector = await connector_of(target, state_dir, namespace, is_forced=force)
        return await connector.apply(wishes)

    with messages.status("scaling"), telling_of_force():
        changes = asyncio.run(carry_out())
    for change in changes:
        print(say_change(change))


async def _standing(target: Target, state_dir: Path, namespace: str) -> Standing:
    return await (await connector_of(target, state_dir, namespace)).standing()


def _print_standing(standing: Standing) -> None:
    for count in standing.counts:
        print(say_count(count))
    if standing.plan is not None:
        print_plan(standing.plan)
        return
    hint = "`lamella autoscale --dry-run` says the scheduler's next one, or why there is none"
    messages.print(f"no plan to show: {hint}", highlight=False, soft_wrap=True)


def drain(
    service: Annotated[
        str, typer.Argument(help="Its name, as `lamella status` shows it, or its container's or pod's.")
    ],
    force: ForceOption = False,
    target: TargetOption = "auto",
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    namespace: NamespaceOption = "lamella",
) -> None:
    """End one process once it has finished what it had; none takes its place until you scale."""

    async def carry_out() -> None:
        connector = await connector_of(target, state_dir, namespace, is_forced=force)
        await connector.drain(service)

    with messages.status("draining"), telling_of_force():
        asyncio.run(carry_out())
    print(f"{service} has drained")


@contextmanager
def telling_of_force() -> Iterator[None]:
    """Only the command line has that option: wishes from elsewhere are refused without its name."""
    try:
        yield
    except LastOfPhase as exc:
        raise LauncherError(f"{exc}; --force ends the last") from exc
