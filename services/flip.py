"""The ``flip`` command: another role for a running instance, without a reload (TetriInfer 3.5).

The role is a rule of admission, so the switch itself is one event in each room. Prompts that are here are
finished, running sequences move to other instances with their KV; the command waits for that.
"""

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.config import MeshConfig
from common.errors import LauncherError
from common.flips import why_not_flip
from common.ids import InstanceId
from common.messages import FlipProgress, FlipRole, MemberRecord, Role
from common.subjects import Subjects
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.members import members_of
from services.tracing.command import mesh_of

CONNECT_TIMEOUT_S = 5.0
ASK_INTERVAL_S = 0.05


class FlipRefused(LauncherError):
    """There is no such instance, or its role is not to be changed."""


class FlipUnfinished(LauncherError):
    """The role is changed, and sequences of the former one are still there."""


def flip(
    instance: Annotated[str, typer.Argument(help="Its name, as `lamella status` shows it.")],
    role: Annotated[Role, typer.Argument(help="What it is to do from now on.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also the last instance that prefills, or decodes.")
    ] = False,
    state_dir: Annotated[Path, typer.Option(help="Of the mesh that runs there.")] = DEFAULT_STATE_DIRECTORY,
    config: Annotated[Path | None, typer.Option(help="Of the mesh with these settings (TOML).")] = None,
) -> None:
    """Change an instance's role while it runs; returns when nothing of its former role is left there."""
    mesh = mesh_of(state_dir, config, None, None)
    with Console(stderr=True).status("flipping"):
        progress = asyncio.run(flip_instance(mesh, instance, role, force=force))
    print(
        f"{instance} is a {role} instance: switched in {progress.switch_s * 1000:.2f} ms,"
        f" {progress.moved} running sequences moved to other instances"
    )


async def flip_instance(mesh: MeshConfig, name: str, role: Role, *, force: bool) -> FlipProgress:
    """Raises FlipRefused, FlipUnfinished, the instance's own RequestError, BusError, StoreUnavailable."""
    from common.bus import Bus

    check_flip(await members_of(mesh), name, role, force=force)
    subjects = Subjects(mesh.namespace)
    bus = Bus(mesh.nats_url, name=f"flip-{secrets.token_hex(3)}", subjects=subjects)
    await bus.connect(CONNECT_TIMEOUT_S)
    subject = subjects.instance_calls(InstanceId(name))
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + mesh.drain_timeout_s
    try:
        while True:
            progress = await bus.call(subject, FlipRole(role), FlipProgress, mesh.call_timeout_s)
            if progress.left == 0:
                return progress
            if loop.time() > deadline_s:
                raise FlipUnfinished(
                    f"{name} is a {role} instance now, and still has {progress.left} sequences of before"
                    f" after mesh.drain_timeout_s = {mesh.drain_timeout_s:g} s: they go on"
                )
            await asyncio.sleep(ASK_INTERVAL_S)
    finally:
        await bus.close()


def check_flip(members: list[MemberRecord], name: str, role: Role, *, force: bool) -> None:
    """Raises FlipRefused."""
    reason = why_not_flip(members, name, role, force=force, forcing="--force")
    if reason is not None:
        raise FlipRefused(reason)
