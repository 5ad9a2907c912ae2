"""Plans carried out over a real store, by a place that has instances, and no say over gateways."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import redis.asyncio

from common.cancellation import cancel_and_wait
from common.errors import ConfigError, LamellaError, LauncherError
from common.scaling import DesiredCounts, ScaledService, ServiceCount
from common.store import Store
from services.launcher.autoscale import follow_plans

WINDOW_S = 0.04
WAIT_S = 20.0
SCALED: frozenset[ScaledService] = frozenset(("prefill", "decode"))


@dataclass(slots=True)
class Place:
    """``asked``: the counts it was to have. Of ``impossible`` ones it cannot."""

    store: Store
    impossible: int = 99
    refusal: LamellaError = field(default_factory=lambda: LauncherError("they do not start"))
    asked: list[Mapping[ScaledService, int]] = field(default_factory=list)
    written: int = 0
    reads: int = 0

    async def read_plan(self) -> DesiredCounts | None:
        plan = await self.store.read_plan()
        self.reads += 1
        return plan

    async def scale(self, counts: Mapping[ScaledService, int]) -> None:
        self.asked.append(counts)
        if self.impossible in counts.values():
            raise self.refusal

    async def write(self, epoch: int, gateway: int = 1, prefill: int = 1, decode: int = 1) -> None:
        """A plan of a scheduler that sees one worker of each kind."""
        self.written += 1
        counts = (
            ServiceCount("gateway", 1, gateway, "many streams"),
            ServiceCount("prefill", 1, prefill, "many prompts"),
            ServiceCount("decode", 1, decode, "many tokens"),
        )
        await self.store.write_plan(DesiredCounts(counts, epoch, float(self.written)))

    async def wait_asked(self, times: int) -> None:
        await wait_until(lambda: len(self.asked) >= times)

    async def wait_read(self, times: int = 3) -> None:
        """Until the plan that is there has been carried out, where it is: one read may have begun before."""
        reads = self.reads + times
        await wait_until(lambda: self.reads >= reads)


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(place: Place, *, is_dry_run: bool = False) -> AsyncIterator[None]:
    follow = follow_plans(place.read_plan, place.scale, SCALED, WINDOW_S, is_dry_run=is_dry_run)
    task = asyncio.create_task(follow)
    try:
        await place.wait_read(times=1)
        yield
        assert not task.done()
    finally:
        await cancel_and_wait(task)


@pytest.fixture
async def place(redis_url: str, namespace: str, anyio_backend: object) -> AsyncIterator[Place]:
    store = Store(redis_url, namespace)
    yield Place(store)
    await store.close()


@pytest.mark.anyio
async def test_a_plan_is_carried_out_where_it_differs_and_can_be(place: Place) -> None:
    async with following(place):
        await place.write(5, gateway=2, decode=3)
        await place.wait_asked(1)
        await place.write(5)
        await place.wait_read()
        await place.write(5, prefill=2, decode=2)
        await place.wait_asked(2)
    assert place.asked == [{"decode": 3}, {"prefill": 2, "decode": 2}]


@pytest.mark.anyio
async def test_a_plan_of_another_life_is_not_carried_out(place: Place) -> None:
    await place.write(5, decode=4)
    async with following(place):
        await place.wait_read()
        assert place.asked == []
        await place.write(6, decode=2)
        await place.wait_asked(1)
    assert place.asked == [{"decode": 2}]


@pytest.mark.anyio
async def test_an_earlier_leader_s_plan_is_refused_even_when_the_store_has_forgotten(
    place: Place, caplog: pytest.LogCaptureFixture, redis_url: str, namespace: str
) -> None:
    async with following(place):
        await place.write(6, decode=2)
        await place.wait_asked(1)
        client = redis.asyncio.Redis.from_url(redis_url)
        await client.delete(f"lamella:{namespace}:plan")
        await client.aclose()
        with caplog.at_level(logging.WARNING):
            await place.write(5, decode=4)
            await place.wait_read()
    assert place.asked == [{"decode": 2}]
    assert any("epoch 5 is over" in str(record.__dict__.get("error")) for record in caplog.records)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "refusal",
    [LauncherError("they do not start"), ConfigError("decode", 99, "must be 0..64 instances")],
    ids=["not started", "too many"],
)
async def test_counts_that_cannot_be_are_said_and_the_next_plan_is_carried_out(
    place: Place, caplog: pytest.LogCaptureFixture, refusal: LamellaError
) -> None:
    place.refusal = refusal
    with caplog.at_level(logging.WARNING):
        async with following(place):
            await place.write(5, decode=place.impossible)
            await place.wait_asked(1)
            await place.wait_read()
            await place.write(5, decode=2)
            await place.wait_asked(2)
    assert place.asked == [{"decode": 99}, {"decode": 2}]
    assert any(str(refusal) == str(record.__dict__.get("error")) for record in caplog.records)


@pytest.mark.anyio
async def test_a_dry_run_says_what_it_would_do_and_why_and_does_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with following(place, is_dry_run=True):
            await place.write(5, decode=3)
            await place.wait_read()
    assert place.asked == []
    said = [record.__dict__ for record in caplog.records if record.message == "would_scale"]
    assert [(each["role"], each["desired"], each["reason"]) for each in said] == [
        ("decode", 3, "many tokens")
    ]
