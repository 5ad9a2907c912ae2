"""A decode instance's pools over real attention workers, bus and store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from common.bus import Bus
from common.config import AttentionConfig
from common.ids import InstanceId, RequestId, new_incarnation
from common.kv.blocks import BlockOwner
from common.messages import AttentionGone, AttentionUse, ServiceRecord, WorkerUse
from common.store import Store
from common.subjects import Subjects
from decode import events
from decode.attention_needs import AttentionNeeds
from decode.attention_pools import AttentionPools
from decode.binding import AttentionUnavailable
from decode.remote_attention import Pools
from tests.attention.worker_service import KV_BYTES, NEEDS, Worker, attention_service, binder
from tests.common.buses import connected, pair, run, until
from tests.decode.states import handle, make_state

LEASE_S = 30.0
ENOUGH, TOO_LITTLE = AttentionConfig(kv_bytes=KV_BYTES), AttentionConfig(kv_bytes=1)


@asynccontextmanager
async def member(redis_url: str, namespace: str, record: ServiceRecord) -> AsyncIterator[None]:
    store = Store(redis_url, namespace)
    await store.join(record, LEASE_S)
    try:
        yield
    finally:
        await store.leave()
        await store.close()


@asynccontextmanager
async def pools_of(
    bus: Bus,
    redis_url: str,
    namespace: str,
    instance_id: str = "decode-0",
    needs: AttentionNeeds = NEEDS,
) -> AsyncIterator[AttentionPools]:
    """Look for workers until the block ends."""
    store = Store(redis_url, namespace)
    state = make_state(total_blocks=0)

    def take(event: events.DecodeEvent) -> None:
        handle(state, event)

    async with binder(bus, namespace) as found:
        own = replace(found, instance_id=InstanceId(instance_id), needs=needs)
        pools = AttentionPools(own, store, state, Pools(), {}, {}, set(), take)
        looks = asyncio.create_task(pools.run())
        try:
            yield pools
            assert not looks.done()
        finally:
            looks.cancel()
            await asyncio.wait({looks})
            await pools.close()
            await store.close()


def test_a_worker_that_can_never_serve_the_model_is_passed_over_once_others_do(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def look() -> None:
        async with pair(nats_url, namespace) as (own, theirs), AsyncExitStack() as workers:

            async def join(service_id: str, settings: AttentionConfig) -> Worker:
                worker = await workers.enter_async_context(
                    attention_service(own, redis_url, namespace, settings, service_id)
                )
                await workers.enter_async_context(member(redis_url, namespace, worker.record))
                return worker

            await join("attention-1", ENOUGH)
            async with pools_of(theirs, redis_url, namespace) as pools:
                await pools.wait_ready()
                useless = await join("attention-0", TOO_LITTLE)
                await until(lambda: useless.record.incarnation in pools._refused, theirs)
                await join("attention-2", ENOUGH)
                await until(lambda: len(pools.workers) == 2, theirs)
                assert (pools.bindings, pools.unsettled) == (2, 0)
                found = sorted(worker.worker_id for [worker] in pools.workers.values())
                assert found == ["attention-1", "attention-2"]

    run(look())


def test_an_instance_whose_only_worker_can_never_serve_its_model_is_not_ready_and_says_why(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def look() -> None:
        async with (
            connected(nats_url, namespace) as own,
            connected(nats_url, namespace, "b") as theirs,
            attention_service(own, redis_url, namespace, TOO_LITTLE) as worker,
            member(redis_url, namespace, worker.record),
            pools_of(theirs, redis_url, namespace) as pools,
        ):
            with pytest.raises(AttentionUnavailable, match="attention-0: a block has 1024 bytes"):
                await pools.wait_ready()

    run(look())


def test_what_workers_hold_is_told_to_whoever_watches_the_mesh(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def look() -> None:
        async with (
            pair(nats_url, namespace) as (own, theirs),
            attention_service(own, redis_url, namespace, ENOUGH) as worker,
            member(redis_url, namespace, worker.record),
        ):
            told: asyncio.Queue[AttentionUse] = asyncio.Queue()
            await own.subscribe(Subjects(namespace).link_traffic(), AttentionUse, told.put_nowait)
            async with pools_of(theirs, redis_url, namespace) as pools:
                await pools.wait_ready()
                blocks, tokens = pools.state.blocks, pools.binder.needs.layout.block_size
                assert blocks.try_allocate(BlockOwner("decode", RequestId("r1"), 0), 2)
                use = WorkerUse(1, 2 * tokens, blocks.total_blocks * tokens)
                while (await told.get()).workers != {"attention-0": use}:
                    pass

    run(look())


def test_a_pool_that_a_step_found_lost_is_given_up_without_waiting_for_the_next_look(
    nats_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.attention_pools.LOOK_S", 1000.0)

    async def look() -> None:
        async with (
            pair(nats_url, namespace) as (own, theirs),
            attention_service(own, redis_url, namespace, ENOUGH) as worker,
            member(redis_url, namespace, worker.record),
            pools_of(theirs, redis_url, namespace) as pools,
        ):
            await pools.wait_ready()
            await asyncio.to_thread(pools.pools.lose, 0, "its worker is gone")
            await until(lambda: not pools.bindings, theirs)
            assert (pools.pools.workers, pools.state.blocks.pools) == ({}, [])

    run(look())


def test_the_pool_of_a_worker_whose_process_has_ended_is_given_up_by_that_life_alone(
    nats_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.attention_pools.LOOK_S", 1000.0)

    async def look() -> None:
        async with (
            pair(nats_url, namespace) as (own, theirs),
            attention_service(own, redis_url, namespace, ENOUGH) as worker,
            member(redis_url, namespace, worker.record),
            pools_of(theirs, redis_url, namespace) as pools,
        ):
            await pools.wait_ready()
            pools.take_event(AttentionGone("attention-0", new_incarnation()))
            assert (pools.bindings, pools.pools.lost) == (1, {})
            pools.take_event(AttentionGone("attention-0", worker.record.incarnation))
            assert pools.pools.lost == {0: "attention worker attention-0: its process has ended"}
            await until(lambda: not pools.bindings, theirs)
            assert (pools.pools.workers, pools.state.blocks.pools) == ({}, [])

    run(look())


def test_a_worker_that_ends_while_it_waits_for_the_others_of_its_pool_is_not_of_it(
    nats_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By heads it is bound, and the other cannot be. That its record is still there makes no difference."""
    monkeypatch.setattr("decode.attention_pools.LOOK_S", 0.01)
    needs = replace(NEEDS, partition="heads", workers=2)

    async def look() -> None:
        async with (
            pair(nats_url, namespace) as (own, theirs),
            attention_service(own, redis_url, namespace, ENOUGH) as worker,
            attention_service(own, redis_url, namespace, TOO_LITTLE, "attention-1") as useless,
            member(redis_url, namespace, worker.record),
            member(redis_url, namespace, useless.record),
            pools_of(theirs, redis_url, namespace, needs=needs) as pools,
        ):
            await until(lambda: len(pools._reserve) == 1, theirs)
            pools.take_event(AttentionGone("attention-0", worker.record.incarnation))
            assert (pools.bindings, pools.unsettled) == (0, 1)
            await until(lambda: not pools.unsettled, theirs)
            looked = pools._lives
            await until(lambda: pools._lives is not looked, theirs)
            assert pools.bindings == 0

    run(look())


def test_of_a_worker_on_another_host_that_is_nobodys_member_any_more_nothing_is_kept(
    nats_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be asked no more, and nothing of it can land after a while."""
    monkeypatch.setattr("decode.attention_pools.LOOK_S", 0.01)
    monkeypatch.setattr("decode.binding.host_identity", lambda: "another host")

    async def look() -> None:
        async with pair(nats_url, namespace) as (own, theirs), AsyncExitStack() as life:
            worker = await life.enter_async_context(attention_service(own, redis_url, namespace, ENOUGH))
            await life.enter_async_context(member(redis_url, namespace, worker.record))
            async with pools_of(theirs, redis_url, namespace) as pools:
                await pools.wait_ready()
                await own.close()
                pools.take_event(AttentionGone("attention-0", worker.record.incarnation))
                await until(lambda: pools.unsettled, theirs)
                await life.aclose()
                await until(lambda: not pools._lives, theirs)
                assert pools.unsettled == 1
                monkeypatch.setattr("decode.attention_pools.FAR_SENDER_SETTLES_S", 0.0)
                await until(lambda: not pools.unsettled, theirs)

    run(look())


def test_an_instance_that_a_worker_has_no_room_for_logs_so_once_and_is_not_ready_for_that_reason(
    nats_url: str,
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("decode.attention_pools.LOOK_S", 0.01)

    async def look() -> None:
        async with (
            pair(nats_url, namespace) as (own, theirs),
            attention_service(own, redis_url, namespace, ENOUGH) as worker,
            member(redis_url, namespace, worker.record),
            pools_of(theirs, redis_url, namespace) as first,
        ):
            await first.wait_ready()
            monkeypatch.setattr("decode.attention_pools.READY_TIMEOUT_S", 1.0)
            async with pools_of(theirs, redis_url, namespace, "decode-1") as second:
                with pytest.raises(AttentionUnavailable, match=r"attention\.decode_instances = 1 already"):
                    await second.wait_ready()

    run(look())
    said = [record for record in caplog.records if record.message == "attention_worker_not_free"]
    assert len(said) == 1
