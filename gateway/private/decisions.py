"""Why requests went where they went: the schedulers' own words, asked of each over HTTP."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from common.decision_query import DecisionQuery, as_query
from common.errors import InvalidRequest, NoInstanceReady, RequestError, StoreError
from common.messages import MemberRecord, ServiceRecord
from common.store import Store

log = logging.getLogger("lamella.gateway")

EVERY_S = 1.0
TIMEOUT_S = 2.0
BAD_REQUEST = 400


class _Dated(msgspec.Struct, frozen=True):
    """As much of a decision as is read here."""

    at_s: float


@dataclass(slots=True)
class DecisionNews:
    """For streams of events: what the schedulers say, asked once however many read it. ``answer``: the latest
    (``newest_decisions``); None before the first."""

    store: Store
    answer: bytes | None = None

    async def follow(self) -> None:
        """Until cancelled. While no scheduler answers the last answer stays: the mesh says who is there."""
        while True:
            try:
                self.answer = await newest_decisions(await self.store.members(), DecisionQuery())
            except (StoreError, RequestError) as exc:
                log.info("decisions_unknown", extra={"error": str(exc)})
            await asyncio.sleep(EVERY_S)


async def newest_decisions(members: Sequence[MemberRecord], asked: DecisionQuery) -> bytes:
    """A JSON list, the newest first, of what the schedulers' ``/decisions`` say; one that does not answer is
    left out. Raises NoInstanceReady where none does, InvalidRequest for a query that they refuse."""
    query = as_query(asked)
    urls = [each.http_url for each in members if isinstance(each, ServiceRecord) and each.kind == "scheduler"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        answers = await asyncio.gather(*(_ask(session, f"{url}/decisions?{query}") for url in urls))
    if all(answer is None for answer in answers):
        raise NoInstanceReady("no scheduler answers")
    found = [decision for answer in answers if answer is not None for decision in answer]
    found.sort(key=lambda each: -msgspec.json.decode(each, type=_Dated).at_s)
    return msgspec.json.encode(found)


async def _ask(session: aiohttp.ClientSession, url: str) -> list[msgspec.Raw] | None:
    """None: it does not answer."""
    try:
        async with session.get(url) as response:
            if response.status == BAD_REQUEST:
                raise InvalidRequest(f"the schedulers refuse that query: {await response.text()}")
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=list[msgspec.Raw])
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as exc:
        log.warning("decisions_unread", extra={"url": url, "error": str(exc)})
        return None
