"""Several schedulers over a real bus and store: one leads, and without a store nobody does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from common.config import MeshConfig
from common.ids import Incarnation
from common.messages import LeaderAnnounced
from common.store import Store
from common.subjects import Subjects
from common.telemetry import new_registry
from scheduler.leadership import Leadership
from scheduler.metrics import LeaderMetrics
from services.launcher import embedded
from tests.common.buses import connected, run, until

MESH = MeshConfig(lease_s=60.0, heartbeat_s=0.1)
SHORT_LEASE_S = 1.5
"""Where one is to end."""


@asynccontextmanager
async def candidate(
    name: str, nats_url: str, redis_url: str, namespace: str, lease_s: float = MESH.lease_s
) -> AsyncIterator[Leadership]:
    store = Store(redis_url, namespace)
    async with connected(nats_url, namespace) as bus:
        mesh = msgspec.structs.replace(MESH, namespace=namespace, lease_s=lease_s)
        subjects, metrics = Subjects(namespace), LeaderMetrics(new_registry("scheduler"))
        leadership = Leadership(store, bus, subjects, name, Incarnation(f"life-{name}"), mesh, metrics)
        await leadership.start()
        keeping = asyncio.create_task(leadership.keep())
        try:
            yield leadership
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            await store.close()


def test_one_leads_and_when_it_resigns_another_does_at_once_with_a_higher_epoch(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        where = nats_url, redis_url, namespace
        async with candidate("a", *where) as a:
            await until(lambda: a.epoch is not None, a.bus)
            first = a.epoch
            async with candidate("b", *where) as b:
                await until(lambda: b.lease.others.highest == first, b.bus)
                assert b.epoch is None
                leader = await b.store.leader()
                assert leader is not None
                assert (leader.service_id, leader.epoch) == ("a", first)
                await a.resign()
                assert a.epoch is None
                await until(lambda: b.epoch is not None, b.bus)
                assert first is not None
                assert b.epoch is not None
                assert b.epoch > first

    run(work())


def test_a_leader_that_falls_silent_is_followed_and_leads_no_more_when_it_wakes(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        where = nats_url, redis_url, namespace, SHORT_LEASE_S
        async with candidate("b", *where) as b:
            await until(lambda: b.epoch is not None, b.bus)
            async with candidate("a", *where) as a:
                await until(lambda: a.lease.others.highest == b.epoch, a.bus)
                before = b.epoch
                # As if it were stopped: it neither renews nor hears.
                async with b._claiming:
                    await until(lambda: a.epoch is not None, a.bus)
                    assert before is not None
                    assert a.epoch is not None
                    assert a.epoch > before
                    assert b.epoch is None
                await until(lambda: b.lease.others.highest == a.epoch, b.bus)
                assert b.epoch is None

    run(work())


def test_a_leader_that_the_bus_does_not_reach_is_followed_though_it_has_the_store(
    nats_url: str, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    """It could command nobody, and nobody else would."""

    async def work() -> None:
        server = embedded.prepare_nats(tmp_path)
        process = embedded.start(server)
        try:
            async with (
                candidate("a", server.url, redis_url, namespace, SHORT_LEASE_S) as a,
                connected(nats_url, namespace) as bus,
            ):
                await until(lambda: a.epoch is not None, a.bus)
                before = a.epoch
                async with candidate("b", nats_url, redis_url, namespace, SHORT_LEASE_S) as b:
                    embedded.stop(process)
                    await until(lambda: b.epoch is not None, bus)
                    assert before is not None
                    assert b.epoch is not None
                    assert b.epoch > before
                    assert a.epoch is None
                    process = embedded.start(server)
                    await until(lambda: a.bus.is_connected, bus)
                    await until(lambda: a.lease.others.highest == b.epoch, bus)
                    assert a.epoch is None
        finally:
            embedded.stop(process)

    run(work())


def test_without_the_store_nobody_leads_until_it_is_back_and_then_with_a_higher_epoch(
    nats_url: str, namespace: str, tmp_path: Path
) -> None:
    async def work() -> None:
        server = embedded.prepare_redis(tmp_path)
        process = embedded.start(server)
        try:
            async with candidate("a", nats_url, server.url, namespace, SHORT_LEASE_S) as a:
                await until(lambda: a.epoch is not None, a.bus)
                before = a.epoch
                embedded.stop(process)
                await until(lambda: a.epoch is None, a.bus)
                # It comes back empty.
                process = embedded.start(server)
                await until(lambda: a.epoch is not None, a.bus)
                assert before is not None
                assert a.epoch is not None
                assert a.epoch > before
        finally:
            embedded.stop(process)

    run(work())


def test_the_leader_tells_everyone_its_epoch_again_and_again(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        heard: list[LeaderAnnounced] = []
        where = nats_url, redis_url, namespace
        async with connected(nats_url, namespace) as bus, candidate("a", *where) as a:
            await until(lambda: a.epoch is not None, bus)
            epoch = a.epoch
            await bus.subscribe(a.subjects.leader(), LeaderAnnounced, heard.append)
            await until(lambda: len(heard) >= 2, bus)
            await a.resign()
            await until(lambda: heard[-1].is_leaving, bus)
        assert {each.epoch for each in heard} == {epoch}

    run(work())
