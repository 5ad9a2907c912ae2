"""A cancellation is not lost, neither by wait_for nor by the store's and the bus's libraries."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from common.bus import Bus
from common.cancellation import cancel_and_wait, keep_cancellation
from common.store import Store
from common.subjects import Subjects


async def deaf() -> str:
    """Loses one cancellation, as wait_for does in Python 3.11."""
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        return "went on"
    return "never"


def test_a_lost_cancellation_is_raised_again() -> None:
    async def work() -> None:
        task = asyncio.create_task(keep_cancellation(deaf()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())


def test_work_that_is_not_cancelled_keeps_its_result_and_its_error() -> None:
    async def fail() -> None:
        raise ValueError("own")

    async def work() -> None:
        assert await keep_cancellation(asyncio.sleep(0, "result")) == "result"
        with pytest.raises(ValueError, match="own"):
            await keep_cancellation(fail())

    asyncio.run(work())


def test_a_timeout_stays_a_timeout() -> None:
    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await keep_cancellation(deaf())
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    asyncio.run(work())


def test_a_task_that_is_deaf_twice_is_cancelled_until_it_hears() -> None:
    async def work() -> None:
        async def twice() -> None:
            await deaf()
            await deaf()
            await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(twice())
        await asyncio.sleep(0)
        await cancel_and_wait(task)
        assert task.cancelled()

    asyncio.run(work())


def test_every_cancelled_call_of_store_and_bus_ends(nats_url: str, redis_url: str, namespace: str) -> None:
    """Cancelled after any number of turns of the loop, so in any of the libraries' awaits."""

    async def cancel_after(turns: int, operation: Callable[[], Awaitable[object]]) -> None:
        async def forever() -> None:
            while True:
                await operation()

        task = asyncio.create_task(forever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait({task})
        assert task.cancelled()

    async def work() -> None:
        bus = Bus(nats_url, name="a", subjects=Subjects(namespace))
        await bus.connect()
        for turns in range(1, 60):
            store = Store(redis_url, namespace)
            await cancel_after(turns, store.members)
            await cancel_after(turns, store.members)
            await store.close()
            await cancel_after(turns, bus.flush)
        await bus.flush()
        await bus.close()

    uvloop.run(work())
