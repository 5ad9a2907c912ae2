"""What every place that can have more or fewer processes of a role promises."""

from typing import Protocol

import msgspec

from common.scaling import DesiredCounts, ScaledService
from services.launcher.wishes import RoleChange, RoleCount, Wishes


class Standing(msgspec.Struct, frozen=True):
    """How many there are of each role that is there. ``plan``: the scheduler's latest, where that can be read
    from outside the mesh."""

    counts: list[RoleCount]
    plan: DesiredCounts | None = None


class Connector(Protocol):
    """Whoever applies wishes where a mesh runs."""

    async def apply(self, wishes: Wishes) -> list[RoleChange]:
        """Returns when there are as many: what is new is ready, what is gone has drained. One change a wish.

        Raises ConfigError for a count that cannot be, LauncherError where it did not come about."""
        ...

    async def drain(self, service_id: str) -> None:
        """Returns when that process has finished what it had and ended; none is started in its place.

        Raises LauncherError where there is none, ConfigError where it is indispensable."""
        ...

    async def standing(self) -> Standing:
        """As it is now; changes nothing. Raises LauncherError where no mesh runs."""
        ...

    @property
    def following_load(self) -> frozenset[ScaledService]:
        """Of the services that are planned, those there may be several of there."""
        ...

    @property
    def hears_wishes(self) -> bool:
        """Whether somebody there answers operators' wishes over NATS without being told to."""
        ...

    def inside(self, *arguments: str) -> tuple[str, ...]:
        """The command that runs ``lamella`` with these arguments and the mesh's settings, with its standard
        input, where the mesh's NATS can be reached. Raises LauncherError where no mesh runs."""
        ...
