"""A mesh under docker compose: a service a role, changed by `docker compose up --scale`.

Commands run in the directory that lamella is called from, so the project, its `.env` and its variables are
those that `docker compose` itself would use there.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from common.errors import LauncherError
from common.messages import Role
from common.scaling import ScaledRole, ScaledService
from services.connectors.connector import Standing
from services.connectors.programs import ProgramFailed, output_of
from services.launcher.autoscale import FOLLOWING_LOAD
from services.launcher.launch_plan import ROLES, SCALED_ROLES, check_counts
from services.launcher.probes import READY_TIMEOUT_S
from services.launcher.wishes import RoleChange, Wishes, check_phases, count_roles, wanted_counts

COMPOSE = ("docker", "compose")
LIST_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 300.0
"""Containers are ended by their own ``stop_grace_period``, well within this."""
ON_GPU = "-gpu"
PRESENT = ("running", "restarting", "paused")
SETTINGS = "/etc/lamella/compose.toml"
"""In every container (docker-compose.yml)."""


class Container(msgspec.Struct, frozen=True, rename="pascal"):
    """A line of ``docker compose ps --format json``, as far as it matters here."""

    id: str = msgspec.field(name="ID")
    name: str
    service: str
    state: str
    health: str = ""

    @property
    def role(self) -> str:
        """Those on GPUs are services of their own."""
        return self.service.removesuffix(ON_GPU)

    @property
    def is_ready(self) -> bool:
        return self.state == "running" and self.health in ("healthy", "")


@dataclass(frozen=True, slots=True)
class ComposeConnector:
    """A Connector. ``is_forced``: the last container that prefills, or decodes, may be ended."""

    is_forced: bool = False
    ready_timeout_s: float = READY_TIMEOUT_S

    async def apply(self, wishes: Wishes) -> list[RoleChange]:
        """Where new containers do not become healthy, there are as many as before again."""
        before = await self.containers()
        _check_not_on_gpus(before, wishes)
        present = {role: _names(before, role) for role in wishes}
        counts = wanted_counts(wishes, {role: len(present[role]) for role in wishes})
        staying = _roles([each for each in before if each.service not in counts])
        wanted = [role for role in ROLES for _ in range(counts.get(role, 0))]
        self._check_phases(before, [*staying, *wanted])
        try:
            await self._up(counts)
        except LauncherError:
            with contextlib.suppress(ProgramFailed):  # what went wrong first is what matters
                await self._up({role: len(names) for role, names in present.items()})
            raise
        after = await self.containers()
        return [_change(role, present[role], _names(after, role)) for role in wishes]

    async def drain(self, service_id: str) -> None:
        """``service_id``: also a container's name. Ended by hand, a container is not started again."""
        containers = await self.containers()
        found = next((each for each in containers if _is(each, service_id)), None)
        if found is None:
            raise LauncherError(f"no container of this project is {service_id}")
        left = [each for each in containers if each != found]
        role = next(each for each in SCALED_ROLES if each == found.role)
        check_counts({role: sum(each.role == role for each in left)})
        self._check_phases(containers, _roles(left))
        await output_of("docker", "stop", found.name, timeout_s=DRAIN_TIMEOUT_S)
        await output_of("docker", "rm", found.name, timeout_s=LIST_TIMEOUT_S)

    async def standing(self) -> Standing:
        """With those on GPUs."""
        containers = await self.containers()
        if not containers:
            raise LauncherError("no container of the mesh runs in this directory's compose project")
        return Standing(count_roles((each.role, each.is_ready) for each in containers))

    @property
    def following_load(self) -> frozenset[ScaledService]:
        """The gateway has the published port, unless a range of them is published."""
        return FOLLOWING_LOAD

    @property
    def hears_wishes(self) -> bool:
        return False

    def inside(self, *arguments: str) -> tuple[str, ...]:
        """In the container of a scheduler: there is always one."""
        return (*COMPOSE, "exec", "-T", "scheduler", "lamella", *arguments, "--config", SETTINGS)

    async def containers(self) -> list[Container]:
        """Those of the mesh that run. Raises ProgramFailed."""
        lines = await output_of(*COMPOSE, "ps", "--all", "--format", "json", timeout_s=LIST_TIMEOUT_S)
        found = [msgspec.json.decode(line, type=Container) for line in lines.splitlines()]
        return [each for each in found if each.state in PRESENT and each.role in SCALED_ROLES]

    def _check_phases(self, before: list[Container], after: list[Role]) -> None:
        if not self.is_forced:
            check_phases(_roles(before), after)

    async def _up(self, counts: Mapping[ScaledRole, int]) -> None:
        """Touches no other service, and no container that is to stay: that would end what runs there."""
        scaled = [option for role, count in counts.items() for option in ("--scale", f"{role}={count}")]
        options = ("--detach", "--wait", "--no-recreate", "--no-deps")
        limit = ("--wait-timeout", f"{self.ready_timeout_s:.0f}")
        command = (*COMPOSE, "up", *options, *limit, *scaled, *counts)
        await output_of(*command, timeout_s=self.ready_timeout_s + DRAIN_TIMEOUT_S)


def _is(container: Container, service_id: str) -> bool:
    """A service's id ends in its container's short one (deploy/entrypoint.py)."""
    return service_id in (container.name, f"{container.role}-{container.id[:12]}")


def _roles(containers: list[Container]) -> list[Role]:
    """Those of instances."""
    return [role for each in containers for role in ROLES if role == each.role]


def _check_not_on_gpus(containers: list[Container], wishes: Wishes) -> None:
    """Plans and operators count instances wherever they compute, and only those on CPUs can be had more of: a
    service on GPUs has the one that its variable names. Raises LauncherError."""
    for each in containers:
        if each.service.endswith(ON_GPU) and each.role in wishes:
            raise LauncherError(
                f"{each.role} computes on a GPU here ({each.name}): `docker compose --profile gpu up --scale"
                f" {each.service}=N` says how many there are to be, `--scale {each.role}=N` how many on CPUs"
            )


def _names(containers: list[Container], role: ScaledRole) -> list[str]:
    return sorted(each.name for each in containers if each.service == role)


def _change(role: ScaledRole, before: list[str], after: list[str]) -> RoleChange:
    started = tuple(name for name in after if name not in before)
    ended = tuple(name for name in before if name not in after)
    return RoleChange(role, len(before), len(after), started, ended)
