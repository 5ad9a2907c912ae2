"""Bookings told and read over a real bus: by change, by page, and after messages were lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.bus import Bus
from common.ids import Incarnation, RequestId
from common.lengths import LengthDistribution
from common.messages import ServiceRecord
from common.subjects import Subjects
from scheduler import events, sharing
from scheduler.sharing import Sharing
from scheduler.state import SchedulerState
from tests.common.buses import connected, run, until
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, ready

CALL_TIMEOUT_S = 10.0


def record_of(name: str) -> ServiceRecord:
    return ServiceRecord(
        service_id=name, incarnation=Incarnation(name), kind="scheduler", host="h", pid=1, http_url=""
    )


def sharing_over(bus: Bus, namespace: str, name: str) -> Sharing:
    """A scheduler's, whose commands to read a peer are carried out."""
    state = SchedulerState(LEASE_S, incarnation=Incarnation(name))
    ready(state, p0=0, d0=0)
    readers = set[asyncio.Task[None]]()

    def handle(event: events.SchedulerStateEvent) -> None:
        for command in state.handle(event, 0.0):
            if isinstance(command, events.ReadPeer):
                readers.add(asyncio.create_task(shared.read(command.scheduler_id, command.incarnation)))
        state.check()

    shared = Sharing(name, state, bus, Subjects(namespace), CALL_TIMEOUT_S, handle)
    return shared


@asynccontextmanager
async def scheduler(nats_url: str, namespace: str, name: str, *others: str) -> AsyncIterator[Sharing]:
    async with connected(nats_url, namespace, name) as bus:
        shared = sharing_over(bus, namespace, name)
        await shared.start([record_of(each) for each in (name, *others)])
        yield shared


def place(shared: Sharing, *names: str) -> None:
    for name in names:
        shared.state.place(make_request(name, 10), 0.0)


def test_who_begins_reads_all_pages_and_hears_what_comes_after(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PAGE_BOOKINGS", 2)

    async def work() -> None:
        async with scheduler(nats_url, namespace, "a") as a:
            place(a, "r0", "r1", "r2", "r3", "r4")
            a.handle(events.RequestOver(RequestId("r1")))
            async with scheduler(nats_url, namespace, "b", "a", "dead") as b:
                assert sorted(b.state.requests) == ["r0", "r2", "r3", "r4"]
                assert RequestId("r1") in b.state.bookings.unbooked
                b.beat()
                await until(lambda: a.state.peers.known, a.bus)
                place(a, "r5")
                a.tell()
                await until(lambda: RequestId("r5") in b.state.requests, b.bus)
                a.handle(events.TaskAcknowledged(RequestId("r5"), 0))
                a.tell()
                await until(lambda: b.state.requests[RequestId("r5")].acknowledged_s is not None, b.bus)

    run(work())


def test_bookings_with_long_predictions_fit_their_pages(nats_url: str, namespace: str) -> None:
    """In one message of a thousand they would be three times as much as NATS takes."""
    lengths = LengthDistribution(tuple((32.0 * place, 1 / 512) for place in range(512)))

    async def work() -> None:
        async with scheduler(nats_url, namespace, "a") as a:
            for number in range(300):
                request = make_request(f"r{number}", 10)
                a.state.place(request, 0.0)
                a.handle(events.LengthPredicted(request, lengths))
            async with scheduler(nats_url, namespace, "b", "a") as b:
                assert b.state.requests.keys() == a.state.requests.keys()

    run(work())


def test_a_change_that_was_not_heard_is_noticed_at_the_next_heartbeat(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with scheduler(nats_url, namespace, "a") as a, scheduler(nats_url, namespace, "b", "a") as b:
            a.beat()
            b.beat()
            await until(lambda: a.state.peers.known and b.state.peers.known, a.bus)
            await until(lambda: all(peer.held is None for peer in b.state.peers.known.values()), b.bus)
            place(a, "r0")
            # As if the bus had dropped it.
            a.state.bookings.take_changes()
            assert not b.state.requests
            a.beat()
            await until(lambda: RequestId("r0") in b.state.requests, b.bus)

    run(work())


def test_who_leaves_is_forgotten_without_being_missed(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with scheduler(nats_url, namespace, "a") as a, scheduler(nats_url, namespace, "b", "a") as b:
            a.beat()
            await until(lambda: b.state.peers.known, b.bus)
            a.leave()
            await until(lambda: not b.state.peers.known, b.bus)

    run(work())


def test_what_is_still_delivered_by_who_has_left_is_told_and_brings_nobody_back(
    nats_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with scheduler(nats_url, namespace, "a") as a, scheduler(nats_url, namespace, "b", "a") as b:
            a.beat()
            b.beat()
            await until(lambda: a.state.peers.known and b.state.peers.known, a.bus)
            a.leave()
            await until(lambda: not b.state.peers.known, b.bus)
            a.beat()
            place(a, "r0")
            a.tell()
            await until(lambda: RequestId("r0") in b.state.requests, b.bus)
            assert not b.state.peers.known, "in a lease's time it would be said to have died"

    run(work())
