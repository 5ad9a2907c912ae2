"""Bookings in a real store: what a scheduler finds there that begins when nobody else is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from common.ids import Incarnation, InstanceId, RequestId
from common.messages import Placement
from common.store import Store
from scheduler import events
from scheduler.mirror import Mirror
from scheduler.state import SchedulerState
from tests.common.buses import run
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, handle, ready

HEARTBEAT_S = 1.0


@asynccontextmanager
async def mirrored(redis_url: str, namespace: str, name: str) -> AsyncIterator[tuple[SchedulerState, Mirror]]:
    """A scheduler that has just begun: it knows its instances, and has read nothing yet."""
    state, store = SchedulerState(LEASE_S, incarnation=Incarnation(name)), Store(redis_url, namespace)
    ready(state, p0=0, d0=0)

    def take(event: events.SchedulerStateEvent) -> None:
        assert handle(state, event, asyncio.get_running_loop().time()) == []

    try:
        yield state, Mirror(store, state.bookings, HEARTBEAT_S, take)
    finally:
        await store.close()


def place(state: SchedulerState, name: str, prompt_tokens: int = 10) -> Placement:
    return state.place(make_request(name, prompt_tokens), 0.0)


def acknowledge(state: SchedulerState, name: str) -> None:
    handle(state, events.TaskAcknowledged(RequestId(name), 0))


def test_who_begins_alone_counts_what_a_dead_scheduler_had_booked(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with mirrored(redis_url, namespace, "a") as (a, mirror):
            place(a, "r0", 10)
            place(a, "r1", 20)
            place(a, "r2", 40)
            acknowledge(a, "r0")
            await mirror.write()
            handle(a, events.RequestOver(RequestId("r2")))
            acknowledge(a, "r1")
            await mirror.write()
        async with mirrored(redis_url, namespace, "b") as (b, mirror):
            await mirror.read()
            assert b.requests.keys() == {"r0", "r1"}
            assert all(each.acknowledged_s is not None for each in b.requests.values())
            assert b.instances[InstanceId("d0")].for_decode.context_tokens == 30
            # Who had it placed it for good: nobody takes it for a new one.
            assert b.bookings.version_of(RequestId("r1")) == a.bookings.version_of(RequestId("r1"))
            await mirror.write()
            assert mirror.written == {}, "a dead scheduler's bookings are written by none until they change"

    run(work())


def test_of_a_booking_that_another_has_changed_the_newest_word_counts(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with (
            mirrored(redis_url, namespace, "a") as (a, of_a),
            mirrored(redis_url, namespace, "b") as (b, of_b),
            mirrored(redis_url, namespace, "c") as (c, of_c),
        ):
            place(a, "r0")
            await of_a.write()
            await of_b.read()
            b.place(make_request("r0", 10, attempt=1), 0.0)
            await of_b.write()
            await of_c.read()
            assert c.bookings.version_of(RequestId("r0")) == b.bookings.version_of(RequestId("r0"))
            [told] = b.bookings.named([RequestId("r0")])
            a.bookings.merge(told, 0.0)
            await of_a.write()
            assert of_a.written == {}
            assert await of_c.store.bookings() == [told]

    run(work())


def test_a_store_that_lost_everything_has_it_again_two_heartbeats_later(
    redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        async with mirrored(redis_url, namespace, "a") as (a, mirror):
            place(a, "r0")
            place(a, "r1")
            await mirror.write()
            await client.delete(*await client.keys(f"lamella:{namespace}:*"))
            place(a, "r2")
            await mirror.write()
            await mirror.write()
            assert {each.request_id for each in await mirror.store.bookings()} == {"r0", "r1", "r2"}
        await client.aclose()

    run(work())


def test_what_ended_while_the_store_was_away_is_gone_from_it_afterwards(
    redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with mirrored(redis_url, namespace, "a") as (a, mirror):
            place(a, "r0")
            place(a, "r1")
            await mirror.write()
            store, mirror.store = mirror.store, Store("redis://127.0.0.1:1", namespace)
            handle(a, events.RequestOver(RequestId("r0")))
            await mirror.write()
            await mirror.read()
            assert mirror.written is None
            await mirror.store.close()
            mirror.store = store
            await mirror.write()
            assert [each.request_id for each in await store.bookings()] == ["r1"]

    run(work())
