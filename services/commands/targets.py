"""`lamella targets`: where Prometheus finds a mesh whose processes listen on ports of their own.

The form is that of Prometheus' file discovery; ``deploy/prometheus/local.yml`` reads it.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from common.config import Config
from common.errors import StoreUnavailable
from common.messages import InstanceRecord, MemberRecord
from services.commands.options import ConfigOption, StateOption, config_of, messages
from services.launcher.state_directory import DEFAULT_STATE_DIRECTORY
from services.members import members_of
from services.output_files import write_whole

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
    settings = config_of(config, state_dir)
    if watch is None:
        print(as_json(asyncio.run(members_of(settings.mesh)), wants_keys(settings)).decode())
        return
    try:
        asyncio.run(keep_written(settings, watch))
    except KeyboardInterrupt:
        return


def wants_keys(config: Config) -> bool:
    """Of whoever reads metrics at a gateway's public port."""
    return config.gateway.api_keys_file is not None


def as_json(members: Iterable[MemberRecord], is_locked: bool = False) -> bytes:
    """In the order of their names, so that a file changes only with them. ``is_locked``: public ports want
    keys, which Prometheus has none of."""
    found = sorted((target_of(each, is_locked) for each in members), key=lambda each: each.labels["instance"])
    return msgspec.json.format(msgspec.json.encode(found))


def target_of(member: MemberRecord, is_locked: bool) -> Target:
    """``component`` is the service that was started: an instance that was lent to another role keeps it."""
    url = member.http_url
    if isinstance(member, InstanceRecord):
        labels: dict[str, str] = {"component": member.home or member.role, "instance": member.instance_id}
    else:
        labels = {"component": member.kind, "instance": member.service_id}
        if is_locked and member.private_url is not None:
            url = member.private_url
    return Target((urlsplit(url).netloc,), labels)


async def keep_written(config: Config, file: Path) -> None:
    """Writes whenever somebody came or went; what was written last stays while the store is away. Runs until
    cancelled."""
    written = b""
    while True:
        try:
            content = as_json(await members_of(config.mesh), wants_keys(config))
        except StoreUnavailable as exc:
            messages.print(f"not updated: {exc}", highlight=False, markup=False)
        else:
            if content != written:
                write_whole("--watch", file, content)  # Prometheus reads the old or the new, never a half
                written = content
        await asyncio.sleep(LOOK_INTERVAL_S)
