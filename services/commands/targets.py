"""`lamella targets`: where Prometheus finds a mesh whose processes listen on ports of their own.

The form is that of Prometheus' file discovery; ``deploy/prometheus/local.yml`` reads it.
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from common.config import MeshConfig
from common.errors import StoreUnavailable
from common.messages import InstanceRecord, MemberRecord
from services.commands.options import ConfigOption, StateOption, config_of, messages
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.members import members_of

LOOK_INTERVAL_S = 2.0


class Target(msgspec.Struct, frozen=True):
    """``targets``: one ``host:port``. ``labels``: of every metric that comes from there."""

    targets: tuple[str]
    labels: dict[str, str]


def targets(
    watch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep this file up to date until Ctrl-C.")
    ] = None,
    config: ConfigOption = None,
    state_dir: StateOption = DEFAULT_STATE_DIRECTORY,
) -> None:
    """Tell Prometheus where this mesh's metrics are (file_sd_configs)."""
    mesh = config_of(config, state_dir).mesh
    if watch is None:
        print(as_json(asyncio.run(members_of(mesh))).decode())
        return
    try:
        asyncio.run(keep_written(mesh, watch))
    except KeyboardInterrupt:
        return


def as_json(members: Iterable[MemberRecord]) -> bytes:
    """In the order of their names, so that a file changes only with them."""
    found = sorted((target_of(each) for each in members), key=lambda each: each.labels["instance"])
    return msgspec.json.format(msgspec.json.encode(found))


def target_of(member: MemberRecord) -> Target:
    """``component`` is the service that was started: an instance that was lent to another role keeps it."""
    if isinstance(member, InstanceRecord):
        labels: dict[str, str] = {"component": member.home or member.role, "instance": member.instance_id}
    else:
        labels = {"component": member.kind, "instance": member.service_id}
    return Target((urlsplit(member.http_url).netloc,), labels)


async def keep_written(mesh: MeshConfig, file: Path) -> None:
    """Writes whenever somebody came or went; what was written last stays while the store is away. Runs until
    cancelled."""
    written = b""
    while True:
        try:
            content = as_json(await members_of(mesh))
        except StoreUnavailable as exc:
            messages.print(f"not updated: {exc}", highlight=False, markup=False)
        else:
            if content != written:
                _replace(file, content)
                written = content
        await asyncio.sleep(LOOK_INTERVAL_S)


def _replace(file: Path, content: bytes) -> None:
    """Prometheus reads the old or the new, never a half."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(content)
    os.replace(new, file)
