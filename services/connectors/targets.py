"""Which connector an operator means."""

import shutil
from pathlib import Path
from typing import Literal

from services.connectors.compose import ComposeConnector
from services.connectors.connector import Connector
from services.connectors.kubernetes import KubernetesConnector
from services.connectors.local import LocalConnector
from services.connectors.programs import ProgramFailed
from services.launcher.local import MeshNotRunning
from services.launcher.state_directory import StateDirectory, is_locked

Target = Literal["auto", "local", "compose", "kubernetes"]


async def connector_of(
    target: Target, state_dir: Path, namespace: str, *, is_forced: bool = False
) -> Connector:
    """Of the place that is named, or of the first in which a mesh runs. Raises MeshNotRunning.

    ``namespace``: the mesh's on Kubernetes, which is not looked at unless it is named: kubectl's current
    context may be anybody's cluster. ``is_forced``: also the last process of a phase may be ended.
    """
    match target:
        case "local":
            return LocalConnector(state_dir, is_forced)
        case "compose":
            return ComposeConnector(is_forced)
        case "kubernetes":
            return KubernetesConnector(namespace, is_forced)
        case "auto":
            return await _find(state_dir, is_forced)


async def _find(state_dir: Path, is_forced: bool) -> Connector:
    if is_locked(StateDirectory(state_dir.expanduser().absolute())):
        return LocalConnector(state_dir, is_forced)
    if shutil.which("docker"):
        connector = ComposeConnector(is_forced)
        try:
            if await connector.containers():
                return connector
        except ProgramFailed:
            # No compose file in this directory, or no engine: nothing of the mesh runs there either.
            pass
    raise MeshNotRunning(f"no mesh runs in {state_dir}, and none under docker compose in this directory")
