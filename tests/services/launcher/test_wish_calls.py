"""What whoever takes up a wish tells of it, after it was acknowledged and when it is over."""

import asyncio

import pytest

from common.bus import Bus
from common.errors import InvalidRequest, LauncherError
from common.messages import Acknowledged, ScaleWish, WishNews
from common.subjects import Subjects
from services.launcher.wish_calls import WishCalls
from services.launcher.wishes import RoleChange, Wishes

WAIT_S = 20.0
WISH = ScaleWish("decode", 3)


class Launcher:
    """Scales when it is let, or says why not."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.refusal: str | None = None

    async def scale(self, wishes: Wishes) -> list[RoleChange]:
        await self.may_end.wait()
        if self.refusal is not None:
            raise LauncherError(self.refusal)
        return []

    async def drain(self, service_id: str) -> None:
        raise LauncherError(f"no process {service_id}")


async def heard(told: "asyncio.Queue[WishNews]") -> WishNews:
    async with asyncio.timeout(WAIT_S):
        return await told.get()


@pytest.mark.anyio
@pytest.mark.parametrize("refusal", [None, "decode-2 ended with 1 before it was ready"])
async def test_a_wish_that_takes_long_is_told_to_be_under_way_and_then_what_came_of_it(
    nats_url: str, namespace: str, refusal: str | None
) -> None:
    subjects, launcher = Subjects(namespace), Launcher()
    bus, operator = (Bus(nats_url, name=name, subjects=subjects) for name in ("launcher", "operator"))
    told: asyncio.Queue[WishNews] = asyncio.Queue()
    try:
        for each in (bus, operator):
            await each.connect(WAIT_S)
        await operator.subscribe(subjects.admin_news(), WishNews, told.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            await WishCalls(launcher.scale, launcher.drain, tasks, subjects).serve(bus)
            await operator.call(subjects.admin_scale(), WISH, Acknowledged, WAIT_S)
            begun = await heard(told)
            assert (begun.wish, begun.state) == (WISH, "under_way")
            launcher.refusal = refusal
            launcher.may_end.set()
            ended = await heard(told)
            expected = "done" if refusal is None else "failed"
            assert (ended.id, ended.state, ended.reason) == (begun.id, expected, refusal or "")
    finally:
        for each in (bus, operator):
            await each.close()


@pytest.mark.anyio
async def test_what_is_so_at_once_is_told_as_done_and_what_is_refused_at_once_only_to_who_asked(
    nats_url: str, namespace: str
) -> None:
    subjects, launcher = Subjects(namespace), Launcher()
    launcher.may_end.set()
    bus = Bus(nats_url, name="both", subjects=subjects)
    told: asyncio.Queue[WishNews] = asyncio.Queue()
    try:
        await bus.connect(WAIT_S)
        await bus.subscribe(subjects.admin_news(), WishNews, told.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            await WishCalls(launcher.scale, launcher.drain, tasks, subjects).serve(bus)
            launcher.refusal = "there is no room"
            with pytest.raises(InvalidRequest, match="there is no room"):
                await bus.call(subjects.admin_scale(), WISH, Acknowledged, WAIT_S)
            launcher.refusal = None
            await bus.call(subjects.admin_scale(), WISH, Acknowledged, WAIT_S)
            assert (await heard(told)).state == "done"
            assert told.empty()
    finally:
        await bus.close()


@pytest.mark.anyio
async def test_what_came_of_a_wish_while_nats_was_away_is_told_to_the_next_connection(
    nats_url: str, namespace: str
) -> None:
    subjects, launcher = Subjects(namespace), Launcher()
    first, second = (Bus(nats_url, name=name, subjects=subjects) for name in ("first", "second"))
    operator = Bus(nats_url, name="operator", subjects=subjects)
    told: asyncio.Queue[WishNews] = asyncio.Queue()
    try:
        for each in (first, second, operator):
            await each.connect(WAIT_S)
        await operator.subscribe(subjects.admin_news(), WishNews, told.put_nowait)
        async with asyncio.TaskGroup() as tasks:
            calls = WishCalls(launcher.scale, launcher.drain, tasks, subjects)
            await calls.serve(first)
            await operator.call(subjects.admin_scale(), WISH, Acknowledged, WAIT_S)
            assert (await heard(told)).state == "under_way"
            await first.close()
            launcher.may_end.set()
        await calls.serve(second)
        assert (await heard(told)).state == "done"
    finally:
        for each in (first, second, operator):
            await each.close()
