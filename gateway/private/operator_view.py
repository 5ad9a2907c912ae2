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

from common.cancellation import cancel_and_wait
from common.decision_query import read_query
from common.errors import Overloaded, StoreError
from common.store import Store
from gateway.app import FULL_RETRY_S
from gateway.delivery import STREAM_HEADERS
from gateway.errors import RouteNotFound, from_store
from gateway.exchange import Exchange
from gateway.journal import Journal
from gateway.private.decisions import DecisionNews, newest_decisions
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
    decision_news: DecisionNews = field(init=False)
    _rate: TokenRate = field(default_factory=TokenRate)
    _streams: int = 0
    _following: asyncio.Task[None] | None = None
    _edition: "_Edition | None" = None
    _editing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.decision_news = DecisionNews(self.store)

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
        """Server-sent events: ``mesh``, ``latency``, ``requests`` and ``decisions``, each with the JSON of
        its address; ``timeline`` with that of ``?request=ID``, null where nobody remembers it."""
        followed = QueryParams(exchange.scope["query_string"]).get("request")
        if self._streams >= MOST_STREAMS:
            raise Overloaded(f"{MOST_STREAMS} streams of events are open", retry_after_s=FULL_RETRY_S)
        self._streams += 1
        if self._following is None:
            self._following = asyncio.create_task(self.decision_news.follow())
        watcher = asyncio.create_task(exchange.watch())
        try:
            await exchange.start(200, STREAM_HEADERS)
            await self._send_events(exchange, _Sent(followed))
        finally:
            watcher.cancel()
            await self._end_stream()

    async def _end_stream(self) -> None:
        """Nobody asks the schedulers for who is gone."""
        self._streams -= 1
        if self._streams == 0 and self._following is not None:
            following, self._following = self._following, None
            await cancel_and_wait(following)

    async def _send_events(self, exchange: Exchange, sent: "_Sent") -> None:
        """Until the client leaves, does not read any more, or this gateway ends."""
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
            events += self._timeline(sent, now)
        decided = self.decision_news.answer
        if decided is not None and decided != sent.decided:
            events.append(_event("decisions", decided))
            sent.decided = decided
        if is_due:
            events.append(edition.event("latency", self._latency))
            sent.at_s = now
        sent.shape, sent.changes = edition.view.shape, edition.changes
        return b"".join(events)

    def _timeline(self, sent: "_Sent", now: float) -> list[bytes]:
        """Of the request that is followed; once it is over, it stands still."""
        if sent.request is None or sent.is_request_over:
            return []
        found = self.journal.requests.find(sent.request, now)
        sent.is_request_over = found is None or not self.journal.requests.is_open(found.request.id)
        return [_event("timeline", msgspec.json.encode(found))]

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
            self._events[name] = _event(name, msgspec.json.encode(make()))
        return self._events[name]


@dataclass(slots=True)
class _Sent:
    """By one stream. ``request``: whose timeline is wanted, too."""

    request: str | None
    is_request_over: bool = False
    decided: bytes | None = None
    at_s: float = -math.inf
    shape: tuple[object, ...] = ()
    changes: int = -1


def _event(name: str, content: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), content)
