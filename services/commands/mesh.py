"""The commands for a mesh that runs on this machine: ``down``, ``status``."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Column, Table

from common.errors import LauncherError
from common.messages import has_phase
from common.phases import missing_phases
from services.commands.options import StateOption, messages
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.printing import output_console

if TYPE_CHECKING:
    from common.scaling import DesiredCounts
    from services.launcher.control import MeshStatus


def down(state_dir: StateOption = DEFAULT_STATE_DIRECTORY) -> None:
    """End the mesh: running requests finish first."""
    from services.launcher.local import down as end_mesh

    with messages.status("draining"):
        processes = end_mesh(state_dir)
    messages.print(f"the mesh has ended: {processes} processes", highlight=False)


def status(
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the mesh's instances and processes, and what it kept of what it promises."""
    from services.launcher.local import mesh_config
    from services.launcher.local import status as mesh_status
    from services.service_levels import read_service_levels, service_table

    mesh = mesh_status(state_dir)
    try:
        levels = read_service_levels(mesh_config(state_dir).mesh)
    except LauncherError as exc:
        levels = []
        messages.print(f"no service levels: {exc}", highlight=False, markup=False, soft_wrap=True)
    mesh = msgspec.structs.replace(mesh, service_levels=levels)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(mesh)).decode())
        return
    print_status(mesh)
    if levels:
        output_console().print(service_table(levels))


def print_status(mesh: "MeshStatus") -> None:
    console = output_console()
    console.print(mesh.url or f"{mesh.state}: no gateway yet", highlight=False)
    instances = {instance.id: instance for instance in mesh.instances}
    # A URL that is cut off cannot be copied: where the terminal is narrow other columns wrap.
    url = Column("url", no_wrap=True)
    table = Table("process", "role", "pid", "state", "restarts", url, box=None)
    for process in mesh.processes:
        shown = instances.get(process.id, process)
        state = shown.state
        if mesh.leader is not None and mesh.leader.id == process.id:
            state += ", leads"
        instance = instances.get(process.id)
        role = shown.role
        if instance is not None and instance.home not in (None, instance.role):
            role += f" (home: {instance.home})"
        page = None if process.private_url is None else f"{process.private_url}/ui/"
        urls = "\n".join(filter(None, (process.url, page)))
        table.add_row(process.id, role, str(process.pid), state, str(process.restarts), urls)
    console.print(table)
    warn_missing(mesh)
    _warn_of_workers(mesh)
    if mesh.plan is not None:
        print_plan(mesh.plan)


def warn_missing(mesh: "MeshStatus") -> None:
    """That it serves nothing, where it cannot."""
    missing = missing_phases(each.role for each in mesh.instances)
    for phase in missing:
        _warn(
            f"no instance does {phase}:",
            f"requests wait, and get a 503, until one does, for example after `lamella scale {phase}=1`",
        )
    for phase in missing_phases(each.role for each in mesh.instances if each.state == "ready"):
        if mesh.state == "ready" and phase not in missing:
            states = (f"{each.id} is {each.state}" for each in mesh.instances if has_phase(each.role, phase))
            _warn(
                f"no instance that does {phase} is ready:",
                f"{', '.join(states)}; requests wait or are refused, unless the store alone is away",
            )


def _warn_of_workers(mesh: "MeshStatus") -> None:
    """Of attention workers that are not there: who waits for them has a record all the same."""
    away = [each for each in mesh.processes if each.role == "attention" and each.state != "ready"]
    if mesh.state == "ready" and away:
        _warn(
            "not every attention worker is ready:",
            f"{', '.join(f'{each.id} is {each.state}' for each in away)}; sequences whose KV it held go on"
            " elsewhere, and by heads every decode instance waits for it",
        )


def _warn(what: str, which: str) -> None:
    messages.print(f"[yellow]{what}[/yellow] {which}", highlight=False, soft_wrap=True)


def print_plan(plan: "DesiredCounts") -> None:
    console = output_console()
    console.print(
        f"{plan.rate_per_s:.3g} requests/s of {plan.prompt_tokens:.0f} + {plan.output_tokens:.0f} tokens"
        + (f"; changed: {', '.join(plan.changed)}" if plan.changed else ""),
        highlight=False,
    )
    table = Table("service", "ready", "wanted", "why", box=None)
    for each in plan.counts:
        table.add_row(each.service, str(each.current), str(each.desired), each.reason)
    console.print(table)
