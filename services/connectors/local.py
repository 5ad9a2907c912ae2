"""A mesh that `lamella up` runs on this machine: its supervisor starts and ends the processes."""

import sys
from dataclasses import dataclass
from pathlib import Path

from common.scaling import ScaledService
from services.connectors.connector import Standing
from services.launcher import local
from services.launcher.autoscale import FOLLOWING_LOAD
from services.launcher.wishes import RoleChange, Wishes, count_roles


@dataclass(frozen=True, slots=True)
class LocalConnector:
    """A Connector."""

    state_dir: Path
    is_forced: bool = False

    async def apply(self, wishes: Wishes) -> list[RoleChange]:
        """The supervisor counts who is there, so two operators' `+1` are two more. Raises MeshNotRunning."""
        return (await local.scale(self.state_dir, wishes, is_forced=self.is_forced)).changes

    async def drain(self, service_id: str) -> None:
        await local.drain(self.state_dir, service_id, is_forced=self.is_forced)

    async def standing(self) -> Standing:
        """By home role, as ``apply`` counts. Raises MeshNotRunning."""
        mesh = await local.ask_status(self.state_dir)
        homes = {each.id: each.home or each.role for each in mesh.instances}
        stay = [each for each in mesh.processes if each.state != "stopping"]
        present = ((homes.get(each.id, each.role), each.url is not None) for each in stay)
        return Standing(count_roles(present), mesh.plan)

    @property
    def following_load(self) -> frozenset[ScaledService]:
        return FOLLOWING_LOAD

    @property
    def hears_wishes(self) -> bool:
        """The supervisor does."""
        return True

    def inside(self, *arguments: str) -> tuple[str, ...]:
        """Raises MeshNotRunning."""
        settings = str(local.settings_file(self.state_dir))
        return (sys.executable, "-m", "services.cli", *arguments, "--config", settings)
