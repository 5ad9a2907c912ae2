"""Everything that the private port shows, as JSON: the handlers of ``/api``.

Numbers, ids and times only: what is asked of the model, and what it answers, is never shown here.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from starlette.datastructures import QueryParams

from common.decision_query import read_query
from common.errors import Overloaded, StoreError
from common.store import Store
from gateway.app import FULL_RETRY_S
from gateway.delivery import STREAM_HEADERS
from gateway.errors import RouteNotFound, from_store
from gateway.exchange import Exchange
from gateway.journal import Journal
from gateway.private.decisions import newest_decisions
from gateway.private.latency_view import LatencyView, TokenRate, latency_view
from gateway.private.mesh_view import MeshView
from gateway.private.mesh_watch import MeshWatch

LOOK_S = 0.2
"""How often a stream of events looks for a change. To wake it at each would cost every token something."""
EVENT_S = 1.0
"""How old what was sent last may become."""
MOST_STREAMS = 32
"""Of events, at once: each looks at the whole mesh."""


@dataclass(slots=True)
class OperatorView:
    """``close`` ends the streams of events; ``count_tokens`` is to be spawned."""

    journal: Journal
    watch: MeshWatch
    store: Store
    write_timeout_s: float
    _rate: TokenRate = field(default_factory=TokenRate)
    _streams: int = 0
    _edition: "_Edition | None" = None
    _editing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def mesh(self, exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode(await self.watch.look()))

    async def latency(self, exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode(self._latency()))

    async def requests(self, exchange: Exchange) -> None:
        found = self.journal.requests.newest(time.monotonic())
        await exchange.respond(200, msgspec.json.encode(found))

    async def request(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"]
        found = self.journal.requests.find(name, time.monotonic())
        if found is None:
            raise RouteNotFound(f"this gateway remembers no request {name}")
        await exchange.respond(200, msgspec.json.encode(found))

    async def decisions(self, exchange: Exchange) -> None:
        """As the schedulers answer, to the same query."""
        asked = read_query(QueryParams(exchange.scope["query_string"]))
        try:
            members = await self.store.members()
        except StoreError as exc:
            raise from_store(exc) from exc
        await exchange.respond(200, await newest_decisions(members, asked))

    async def events(self, exchange: Exchange) -> None:
        """Server-sent events: ``mesh``, ``latency`` and ``requests``, each with the JSON of its address."""
        if self._streams >= MOST_STREAMS:
            raise Overloaded(f"{MOST_STREAMS} streams of events are open", retry_after_s=FULL_RETRY_S)
        self._streams += 1
        watcher = asyncio.create_task(exchange.watch())
        try:
            await exchange.start(200, STREAM_HEADERS)
            await self._send_events(exchange)
        finally:
            self._streams -= 1
            watcher.cancel()

    async def _send_events(self, exchange: Exchange) -> None:
        """Until the client leaves, does not read any more, or this gateway ends."""
        sent = _Sent()
        while not (exchange.disconnected.is_set() or self._closing.is_set()):
            body = await self._news(sent)
            try:
                async with asyncio.timeout(self.write_timeout_s):
                    await exchange.write(body, more=True)
            except TimeoutError:
                exchange.cut()
                return
            await asyncio.sleep(LOOK_S)
        await exchange.finish(b"")

    async def _news(self, sent: "_Sent") -> bytes:
        """What has changed since, or has grown old."""
        edition, now = await self._newest_edition(), time.monotonic()
        is_due = now - sent.at_s >= EVENT_S
        events = []
        if is_due or edition.view.shape != sent.shape:
            events.append(edition.event("mesh", lambda: edition.view))
        if is_due or edition.changes != sent.changes:
            events.append(edition.event("requests", lambda: self.journal.requests.newest(now)))
        if is_due:
            events.append(edition.event("latency", self._latency))
            sent.at_s = now
        sent.shape, sent.changes = edition.view.shape, edition.changes
        return b"".join(events)

    async def _newest_edition(self) -> "_Edition":
        """However many streams there are, the mesh is looked at once and each event made once."""
        async with self._editing:
            edition = self._edition
            if edition is None or time.monotonic() - edition.made_s >= LOOK_S:
                view = await self.watch.look()
                edition = _Edition(view, self.journal.requests.changes, time.monotonic())
                self._edition = edition
            return edition

    async def count_tokens(self) -> None:
        """Runs until cancelled."""
        while True:
            self._tokens_per_s()
            await asyncio.sleep(EVENT_S)

    def close(self) -> None:
        self._closing.set()

    def _tokens_per_s(self) -> float:
        return self._rate.look(self.journal.tokens, time.monotonic())

    def _latency(self) -> LatencyView:
        levels, now = self.journal.judge.levels, time.monotonic()
        return latency_view(levels, now, self._tokens_per_s(), len(self.journal.open))


@dataclass(slots=True)
class _Edition:
    """What all streams of events send until the next look; ``changes``: of the requests."""

    view: MeshView
    changes: int
    made_s: float
    _events: dict[str, bytes] = field(default_factory=dict)

    def event(self, name: str, make: Callable[[], msgspec.Struct]) -> bytes:
        """Made for the first stream that sends it."""
        if name not in self._events:
            self._events[name] = b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(make()))
        return self._events[name]


@dataclass(slots=True)
class _Sent:
    """By one stream."""

    at_s: float = -math.inf
    shape: tuple[object, ...] = ()
    changes: int = -1
