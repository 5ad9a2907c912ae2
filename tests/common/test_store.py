"""The store over a real Valkey: leases, incarnations, garbage, loss, flush and hang of the server."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import redis.asyncio

from common.errors import StoreError, StoreUnavailable
from common.ids import Incarnation, InstanceId, RequestId
from common.messages import InstanceLife, InstanceRecord, MemberRecord, ServiceRecord
from common.messages.bookings import Booking, BookingVersion
from common.scaling import DesiredCounts, ServiceCount
from common.store import BOOKINGS_KEPT_S, MemberSuperseded, Store
from services.launcher import embedded

Result = TypeVar("Result")
WAIT_S = 20.0
LONG_S = 3600.0


def run(work: Awaitable[Result]) -> Result:
    async def bounded() -> Result:
        async with asyncio.timeout(WAIT_S):
            return await work

    return asyncio.run(bounded())


@asynccontextmanager
async def opened(url: str, namespace: str) -> AsyncIterator[Store]:
    store = Store(url, namespace)
    try:
        yield store
    finally:
        await store.close()


def instance(name: str, incarnation: str = "1" * 16, port: int = 80) -> InstanceRecord:
    return InstanceRecord(
        instance_id=InstanceId(name),
        incarnation=Incarnation(incarnation),
        role="prefill",
        model="m",
        host="h",
        pid=1,
        http_url=f"http://h:{port}",
        block_size=16,
        total_blocks=8,
        largest_pool_blocks=8,
        context_length=128,
        dtype="fp32",
    )


def gateway(name: str) -> ServiceRecord:
    return ServiceRecord(
        service_id=name,
        incarnation=Incarnation("2" * 16),
        kind="gateway",
        host="h",
        pid=2,
        http_url="http://h:81",
    )


def life(name: str, incarnation: str) -> InstanceLife:
    return InstanceLife(InstanceId(name), Incarnation(incarnation))


def by_id(records: list[MemberRecord]) -> list[MemberRecord]:
    return sorted(records, key=lambda record: record.http_url)


def test_members_are_what_they_wrote_and_gone_when_they_leave(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with opened(redis_url, namespace) as one, opened(redis_url, namespace) as other:
            assert await one.members() == []
            await one.join(instance("i"), LONG_S)
            await other.join(gateway("g"), LONG_S)
            assert by_id(await one.members()) == [instance("i"), gateway("g")]
            await one.leave()
            assert await other.members() == [gateway("g")]
            await other.leave()
            assert await one.members() == []

    run(work())


def test_an_unrenewed_lease_ends_and_a_renewal_brings_the_member_back(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with opened(redis_url, namespace) as store:
            await store.join(instance("i"), lease_s=0.05)
            while await store.members():
                pass
            await store.renew()
            await store.join(instance("i"), LONG_S)
            assert await store.members() == [instance("i")]

    run(work())


def test_a_service_that_begins_anew_knows_of_its_lives_that_did_not_leave(
    redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with (
            opened(redis_url, namespace) as first,
            opened(redis_url, namespace) as second,
            opened(redis_url, namespace) as third,
        ):
            one, two, three = (
                msgspec.structs.replace(gateway("g"), incarnation=Incarnation(digit * 16)) for digit in "123"
            )
            await first.join(one, lease_s=0.2)
            await second.join(two, LONG_S)
            assert await second.former_lives("gateway", "g", two.incarnation) == [one.incarnation]
            assert await second.former_lives("gateway", "h", two.incarnation) == []
            assert await second.former_lives("scheduler", "g", two.incarnation) == []
            await second.leave()
            await third.join(three, LONG_S)
            assert await third.former_lives("gateway", "g", three.incarnation) == [one.incarnation]

    run(work())


def test_instances_that_ended_without_leaving_are_known_by_each_of_their_lives(
    redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with (
            opened(redis_url, namespace) as one,
            opened(redis_url, namespace) as other,
            opened(redis_url, namespace) as third,
        ):
            await one.join(instance("i"), LONG_S)
            await other.join(instance("j"), lease_s=0.3)
            await third.join(gateway("g"), lease_s=0.3)
            while await one.members() != [instance("i")]:
                pass
            assert await one.departed() == [life("j", "1" * 16)]
            await other.join(instance("i", "3" * 16), LONG_S)
            assert {each.instance_id for each in await one.departed()} == {"i", "j"}
            await other.leave()
            assert life("i", "3" * 16) not in await one.departed()

    run(work())


def test_meshes_with_other_namespaces_do_not_see_each_other(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with opened(redis_url, namespace) as one, opened(redis_url, f"{namespace}-b") as other:
            await one.join(instance("i"), LONG_S)
            assert await other.members() == []

    run(work())


def test_a_record_may_change_during_its_lease(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with opened(redis_url, namespace) as store:
            await store.join(instance("i"), LONG_S)
            changed = msgspec.structs.replace(instance("i"), role="decode")
            await store.update(changed)
            assert await store.members() == [changed]

    run(work())


def test_an_older_incarnation_cannot_write_over_a_newer_one_nor_remove_it(
    redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with opened(redis_url, namespace) as older, opened(redis_url, namespace) as newer:
            await older.join(instance("i", "a" * 16), LONG_S)
            await newer.join(instance("i", "b" * 16), LONG_S)
            with pytest.raises(MemberSuperseded, match="newer incarnation of i"):
                await older.renew()
            await older.leave()
            await newer.renew()
            assert await older.members() == [instance("i", "b" * 16)]

    run(work())


def test_leaving_twice_or_before_joining_is_nothing_and_renewing_then_an_error(
    redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with opened(redis_url, namespace) as store:
            await store.leave()
            with pytest.raises(StoreError, match="not joined"):
                await store.renew()
            await store.join(instance("i"), LONG_S)
            await store.leave()
            await store.leave()

    run(work())


def test_garbage_values_are_skipped_and_counted(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        async with opened(redis_url, namespace) as store:
            await store.join(instance("i"), LONG_S)
            for name, value in (
                ("x", b""),
                ("y", b"abc\n{}"),
                ("z", b'a\n{"type":"instance"}'),
                ("w", b"\xff"),
            ):
                await client.set(f"lamella:{namespace}:member:{name}", value)
                await client.zadd(f"lamella:{namespace}:members", {name: 0})
            await client.zadd(f"lamella:{namespace}:members", {b"\xff\xfe": 0})
            assert await store.members() == [instance("i")]
            assert store.malformed == 4
        await client.aclose()

    run(work())


def test_ids_that_stay_silent_leave_the_index(redis_url: str, namespace: str) -> None:
    async def work() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        async with opened(redis_url, namespace) as store:
            await client.zadd(f"lamella:{namespace}:members", {f"old-{i}": 1 for i in range(100)})
            await store.join(instance("i"), 1.0)
            assert await client.zrange(f"lamella:{namespace}:members", 0, -1) == [b"i"]
        await client.aclose()

    run(work())


def test_a_flushed_store_is_complete_again_after_one_renewal_of_each(tmp_path: Path) -> None:
    server = embedded.prepare_redis(tmp_path)
    process = embedded.start(server)

    async def work() -> None:
        client = redis.asyncio.Redis.from_url(server.url)
        async with opened(server.url, "n") as one, opened(server.url, "n") as other:
            await one.join(instance("i"), LONG_S)
            await other.join(gateway("g"), LONG_S)
            await client.flushall()
            await client.script_flush()
            assert await one.members() == []
            await one.renew()
            await other.renew()
            assert by_id(await one.members()) == [instance("i"), gateway("g")]
        await client.aclose()

    try:
        run(work())
    finally:
        embedded.stop(process)


def test_a_store_that_is_away_fails_by_name_and_works_again_when_it_is_back(tmp_path: Path) -> None:
    server = embedded.prepare_redis(tmp_path)
    process = embedded.start(server)

    async def work() -> None:
        nonlocal process
        async with opened(server.url, "n") as store:
            await store.join(instance("i"), LONG_S)
            process.kill()
            process.wait()
            with pytest.raises(StoreUnavailable, match=rf"127\.0\.0\.1:{server.port}") as caught:
                await store.renew()
            assert "@" not in str(caught.value)
            with pytest.raises(StoreUnavailable):
                await store.members()
            process = embedded.start(server)
            await store.renew()
            assert await store.members() == [instance("i")]

    try:
        run(work())
    finally:
        embedded.stop(process)


def test_a_join_that_failed_is_made_good_by_the_next_renewal_over_an_older_incarnation(
    tmp_path: Path,
) -> None:
    server = embedded.prepare_redis(tmp_path)

    async def join_late(store: Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.join(instance("i", "b" * 16), LONG_S)

    async def work() -> None:
        async with opened(server.url, "n") as newer:
            await join_late(newer)
            process = embedded.start(server)
            try:
                async with opened(server.url, "n") as older:
                    await older.join(instance("i", "a" * 16), LONG_S)
                    await newer.renew()
                    assert await older.members() == [instance("i", "b" * 16)]
            finally:
                embedded.stop(process)

    run(work())


def test_a_store_that_hangs_is_unavailable_and_usable_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embedded.prepare_redis(tmp_path)
    process = embedded.start(server)

    async def work() -> None:
        async with opened(server.url, "n") as store:
            await store.join(instance("i"), LONG_S)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with monkeypatch.context() as patch:
                    patch.setattr("common.store.OPERATION_TIMEOUT_S", 0.9)
                    with pytest.raises(StoreUnavailable, match="no answer"):
                        await store.members()
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert await store.members() == [instance("i")]

    try:
        run(work())
    finally:
        embedded.stop(process)


def plan_of(epoch: int, decode: int) -> DesiredCounts:
    return DesiredCounts((ServiceCount("decode", 1, decode, "many requests"),), epoch, decided_unix_s=1.5)


def test_the_latest_plan_stays_and_none_of_an_earlier_leader_replaces_it(
    redis_url: str, namespace: str
) -> None:
    async def scenario() -> None:
        async with opened(redis_url, namespace) as store, opened(redis_url, namespace) as other:
            assert await other.read_plan() is None
            assert await store.write_plan(plan_of(7, 2))
            assert await store.write_plan(plan_of(7, 3))
            assert not await other.write_plan(plan_of(6, 9))
            assert await other.read_plan() == plan_of(7, 3)
            assert await other.write_plan(plan_of(8, 1))
            assert await store.read_plan() == plan_of(8, 1)

    run(scenario())


def test_a_plan_that_cannot_be_read_is_none(redis_url: str, namespace: str) -> None:
    async def scenario() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        await client.set(f"lamella:{namespace}:plan", b"7\nnonsense")
        await client.aclose()
        async with opened(redis_url, namespace) as store:
            assert await store.read_plan() is None
            assert store.malformed == 1
            assert await store.write_plan(plan_of(7, 2))

    run(scenario())


def booking_of(name: str, revision: int = 0) -> Booking:
    return Booking(RequestId(name), BookingVersion(0, revision=revision, writer=Incarnation("s")))


def test_bookings_are_added_to_taken_out_and_replaced_by_their_writer(redis_url: str, namespace: str) -> None:
    async def scenario() -> None:
        one, other = Incarnation("s"), Incarnation("t")
        async with opened(redis_url, namespace) as store:
            assert await store.bookings() == []
            assert not await store.write_bookings(one, [booking_of("r0")], is_whole=False)
            changed = [booking_of("r0", 1), booking_of("r1")]
            assert await store.write_bookings(one, changed, [RequestId("r9")], is_whole=False)
            await store.write_bookings(other, [booking_of("r2")], is_whole=True)
            assert by_request(await store.bookings()) == [*changed, booking_of("r2")]
            assert await store.write_bookings(one, [], [RequestId("r0")], is_whole=False)
            assert by_request(await store.bookings()) == [booking_of("r1"), booking_of("r2")]
            await store.write_bookings(one, [booking_of("r3")], is_whole=True)
            assert by_request(await store.bookings()) == [booking_of("r2"), booking_of("r3")]

    run(scenario())


def test_bookings_end_with_their_writers_silence_and_those_that_are_none_are_skipped(
    redis_url: str, namespace: str
) -> None:
    async def scenario() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        key = f"lamella:{namespace}:booked:s"
        async with opened(redis_url, namespace) as store:
            await store.write_bookings(Incarnation("s"), [booking_of("r0")], is_whole=True)
            assert 0 < await client.ttl(key) <= BOOKINGS_KEPT_S
            await client.hset(key, "r1", b"nonsense")
            assert await store.bookings() == [booking_of("r0")]
            assert store.malformed == 1
            await client.delete(key)
            assert await store.bookings() == []
            assert await client.smembers(f"lamella:{namespace}:booked") == set()
        await client.aclose()

    run(scenario())


def by_request(bookings: list[Booking]) -> list[Booking]:
    return sorted(bookings, key=lambda booking: booking.request_id)
