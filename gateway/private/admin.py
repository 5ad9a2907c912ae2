"""What an operator may ask of the mesh on the private port, with the admin key: flip, drain, scale."""

import logging
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from common.bus import Bus
from common.config import MeshConfig
from common.errors import BusError, InvalidRequest, NoInstanceReady, NoResponder, StoreError
from common.flips import why_not_flip
from common.ids import InstanceId
from common.messages import Acknowledged, DrainWish, FlipProgress, FlipRole, Role, ScaleWish
from common.scaling import ScaledRole
from common.store import Store
from common.subjects import Subjects
from gateway.access import Keys, check_key
from gateway.app import Handler
from gateway.errors import Refused, from_bus, from_store
from gateway.exchange import BodyLimits, Exchange

log = logging.getLogger("lamella.gateway")

Wish = TypeVar("Wish", bound=msgspec.Struct)

BODY_LIMITS = BodyLimits(max_bytes=4096, timeout_s=5.0)
MOST_PROCESSES = 1_000_000
"""That anybody may ask for: the launcher knows how many it can start, but no message holds any number."""
ACCEPTED = 202
FORCING = '"force": true'
"""The word of a wish to flip."""


class FlipWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``force``: also the last instance that prefills, or decodes."""

    instance: InstanceId
    role: Role
    force: bool = False


class CountWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many processes of that role there are to be."""

    role: ScaledRole
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROCESSES)]


class EndWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is to finish what it has, and end."""

    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Admin:
    """``keys`` None: no admin key is configured, and nothing may be asked."""

    bus: Bus
    store: Store
    subjects: Subjects
    mesh: MeshConfig
    keys: Keys | None

    @property
    def handlers(self) -> dict[str, Handler]:
        """What may be asked, by the last part of its address; refused where there is no key."""
        return {"flip": self.flip, "scale": self.scale, "drain": self.drain}

    @property
    def wishes(self) -> tuple[str, ...]:
        """Those that an operator with the key may have."""
        return () if self.keys is None else tuple(self.handlers)

    async def flip(self, exchange: Exchange) -> None:
        """Answers once the role is changed; sequences of the former one may still be there (``left``)."""
        wish = await self._read(exchange, FlipWish)
        try:
            members = await self.store.members()
        except StoreError as exc:
            raise from_store(exc) from exc
        reason = why_not_flip(members, wish.instance, wish.role, force=wish.force, forcing=FORCING)
        if reason is not None:
            raise Refused(reason)
        subject, timeout_s = self.subjects.instance_calls(wish.instance), self.mesh.call_timeout_s
        try:
            progress = await self.bus.call(subject, FlipRole(wish.role), FlipProgress, timeout_s)
        except BusError as exc:
            raise from_bus(exc) from exc
        log.info("admin_flip", extra={"instance": wish.instance, "role": wish.role})
        await exchange.respond(ACCEPTED, msgspec.json.encode(progress))

    async def scale(self, exchange: Exchange) -> None:
        """Answers once it is taken up, which may be minutes before it is so."""
        wish = await self._read(exchange, CountWish)
        await self._ask_launcher(self.subjects.admin_scale(), ScaleWish(wish.role, wish.count))
        log.info("admin_scale", extra={"role": wish.role, "count": wish.count})
        await exchange.respond(ACCEPTED, b"{}")

    async def drain(self, exchange: Exchange) -> None:
        """Likewise."""
        wish = await self._read(exchange, EndWish)
        await self._ask_launcher(self.subjects.admin_drain(), DrainWish(wish.instance))
        log.info("admin_drain", extra={"instance": wish.instance})
        await exchange.respond(ACCEPTED, b"{}")

    async def _ask_launcher(self, subject: str, wish: ScaleWish | DrainWish) -> None:
        """Raises Refused, NoInstanceReady."""
        try:
            await self.bus.call(subject, wish, Acknowledged, self.mesh.call_timeout_s)
        except InvalidRequest as exc:
            raise Refused(exc.message) from exc
        except NoResponder as exc:
            reason = (
                "nobody starts and ends this mesh's processes at a gateway's word: run `lamella autoscale`"
                " for it, or use `lamella scale` and `lamella drain`"
            )
            raise NoInstanceReady(reason) from exc
        except BusError as exc:
            raise from_bus(exc) from exc

    async def _read(self, exchange: Exchange, kind: type[Wish]) -> Wish:
        """Raises Unauthorized, Forbidden, InvalidRequest."""
        check_key(exchange, self.keys)
        body = await exchange.read_json(BODY_LIMITS)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as exc:
            raise InvalidRequest(f"the body is no {kind.__name__}: {exc}") from exc
