"""Calls that hand tasks over end with their instance's process."""

import asyncio

import pytest

from common.errors import BusTimeout, NoInstanceReady
from common.ids import Incarnation, InstanceId
from common.messages import InstanceLife
from scheduler.handing_over import HandingOver

LIFE = InstanceLife(InstanceId("prefill-0"), Incarnation("i1"))
NEXT_LIFE = InstanceLife(InstanceId("prefill-0"), Incarnation("i2"))


async def never(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def refuse() -> None:
    raise NoInstanceReady("drains")


async def answer() -> None:
    await asyncio.sleep(0)


def test_a_call_ends_with_its_instances_life_and_no_other_does() -> None:
    async def work() -> None:
        handing_over, ended, kept = HandingOver(), asyncio.Event(), asyncio.Event()
        call = asyncio.create_task(handing_over.wait(LIFE, never(ended)))
        other = asyncio.create_task(handing_over.wait(NEXT_LIFE, never(kept)))
        await asyncio.sleep(0.01)
        handing_over.end(LIFE)
        with pytest.raises(BusTimeout, match="prefill-0 has ended"):
            await call
        assert ended.is_set()
        assert not other.done()
        handing_over.end(LIFE)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        await asyncio.wait_for(kept.wait(), 5)

    asyncio.run(work())


def test_what_a_call_says_is_passed_on_and_nothing_is_kept_of_it() -> None:
    async def work() -> None:
        handing_over = HandingOver()
        await handing_over.wait(LIFE, answer())
        with pytest.raises(NoInstanceReady, match="drains"):
            await handing_over.wait(LIFE, refuse())
        assert handing_over == HandingOver()

    asyncio.run(work())
