"""An attention worker's bindings over a real bus: how they end, and what is left of them."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from common.config import AttentionConfig, TransferConfig
from common.errors import EngineError
from common.ids import BindingId
from common.messages import Acknowledged, InstanceGone
from common.messages.attention import UnbindAttention
from common.model.exchange import Pace
from common.model.interface import SequenceChunk
from common.subjects import Subjects
from decode.binding import AttentionNotFree
from tests.attention.worker_service import (
    CALL_TIMEOUT_S,
    KV_BYTES,
    LAYERS,
    NEEDS,
    Worker,
    attention_service,
    binder,
)
from tests.common.buses import pair, run, until

STEP = [SequenceChunk((0,), 0, 1, key=7)]
MORE_THAN_THERE_IS = 1 << 60


def counts_of(worker: Worker) -> dict[str, float | None]:
    """As they are exported."""
    registry = worker.service.process.registry
    return {
        name: registry.get_sample_value(f"lamella_attention_{name}") for name in ("bindings", "pools_kept")
    }


def test_a_worker_whose_thread_has_ended_ends_and_still_gives_a_binding_up(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def serve() -> None:
        settings = AttentionConfig(kv_bytes=KV_BYTES)
        async with (
            pair(nats_url, namespace) as (own, theirs),
            binder(theirs, namespace) as instance,
            attention_service(own, redis_url, namespace, settings) as worker,
        ):
            binding = await instance.bind(worker.record, 0)
            assert worker.service.loop._cores is not None
            worker.service.loop._cores.close()
            binding.exchange.lanes[0].announce(STEP, 1, LAYERS)
            try:
                await asyncio.sleep(CALL_TIMEOUT_S)
            finally:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await asyncio.to_thread(worker.service.loop.remove, binding.binding_id)

    with pytest.raises(ExceptionGroup) as failure:
        run(serve())
    [error] = failure.value.exceptions
    assert isinstance(error, EngineError)
    assert "Bad file descriptor" in str(error)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_bindings_kv_is_freed_with_it(is_kept: bool, nats_url: str, redis_url: str, namespace: str) -> None:
    async def serve() -> None:
        settings = AttentionConfig(kv_bytes=KV_BYTES)
        async with (
            pair(nats_url, namespace) as (own, theirs),
            binder(theirs, namespace) as instance,
            attention_service(own, redis_url, namespace, settings) as worker,
        ):
            binding = await instance.bind(worker.record, 0)
            service = worker.service
            pool = weakref.ref(service._served[binding.binding_id].pool)
            binding.exchange.lanes[0].announce(STEP, 1, LAYERS)
            await until(lambda: service.loop.lanes[0].is_in_step, theirs)
            assert counts_of(worker) == {"bindings": 1, "pools_kept": 0}
            if is_kept:
                service.take_event(InstanceGone(instance.instance_id, instance.incarnation))
                await until(lambda: counts_of(worker) == {"bindings": 0, "pools_kept": 1}, theirs)
                assert pool() is not None
            assert await instance.unbind(binding)
            await until(lambda: counts_of(worker) == {"bindings": 0, "pools_kept": 0}, theirs)
            assert pool() is None

    gc.collect()
    gc.disable()
    try:
        run(serve())
    finally:
        gc.enable()


def test_an_instance_lost_while_its_binding_fails_for_want_of_memory_is_no_failure_of_the_worker(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def serve() -> None:
        settings = AttentionConfig(kv_bytes=MORE_THAN_THERE_IS)
        async with (
            pair(nats_url, namespace) as (own, theirs),
            binder(theirs, namespace) as instance,
            attention_service(own, redis_url, namespace, settings) as worker,
        ):
            service = worker.service
            async with service._changes:
                bound = asyncio.create_task(instance.bind(worker.record, 0))
                await until(lambda: service._changes._waiters, theirs)
                service.take_event(InstanceGone(instance.instance_id, instance.incarnation))
                await asyncio.sleep(0)
            with pytest.raises(AttentionNotFree):
                await bound
            assert not service.state.kept
            assert not service.state.bindings
            subject = Subjects(namespace).attention_calls(worker.record.service_id)
            await theirs.call(subject, UnbindAttention(BindingId("none")), Acknowledged, CALL_TIMEOUT_S)

    run(serve())


def test_the_lanes_to_one_worker_share_an_emulated_link_in_each_direction(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    slow = TransferConfig(path="shared_memory", emulated_bandwidth_bytes_per_s=1e6)

    async def serve() -> None:
        settings = AttentionConfig(kv_bytes=KV_BYTES)
        async with (
            pair(nats_url, namespace) as (own, theirs),
            binder(theirs, namespace, replace(NEEDS, lanes=3), lambda: Pace(1e6, 0.0)) as instance,
            attention_service(own, redis_url, namespace, settings, transfer_config=slow) as worker,
        ):
            binding = await instance.bind(worker.record, 0)
            ends = [binding.exchange.lanes, [lane._lane for lane in worker.service.loop.lanes]]
            for lanes in ends:
                assert len(lanes) == 3
                assert lanes[0]._pace is not None
                assert len({id(lane._pace) for lane in lanes}) == 1
            assert ends[0][0]._pace is not ends[1][0]._pace

    run(serve())


def test_a_link_carries_what_several_threads_send_one_after_the_other() -> None:
    pace = Pace(1e6, 0.0)
    sends = 2000
    began_ns = time.monotonic_ns()
    with ThreadPoolExecutor(4) as threads:
        due_ns = list(threads.map(lambda _: pace.due_ns(1000), range(sends)))
    assert len({*due_ns}) == sends
    assert max(due_ns) - began_ns >= sends * 1_000_000


def test_a_thread_whose_end_nobody_waits_for_any_more_ends_quietly(
    nats_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a service ends in order: what watches it is cancelled before it is told to stop."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    async def end() -> None:
        async with (
            pair(nats_url, namespace) as (own, _),
            attention_service(own, redis_url, namespace, AttentionConfig(kv_bytes=KV_BYTES)) as worker,
        ):
            worker.service.process._cancel_tasks()
            await asyncio.sleep(0)
            assert worker.service._thread is not None
            assert worker.service._thread.is_alive()

    run(end())
    assert raised == []
