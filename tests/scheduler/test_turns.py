"""Calls that a scheduler holds for requests that wait, over a real bus."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import pytest

from common.config import Config, PredictorConfig, SchedulerConfig
from common.errors import NoInstanceReady, NoResponder, Overloaded, RequestCancelled
from common.ids import InstanceId
from common.messages import Acknowledged, Placement, PrefillTask, Queued, SubmitRequest
from common.messages.bookings import BookingsChanged
from common.store import Store
from common.subjects import Subjects
from common.telemetry import new_registry
from scheduler import events
from scheduler.metrics import SchedulerMetrics
from scheduler.service import SchedulerService
from scheduler.state import SchedulerState
from scheduler.waiting_room import WaitingRoom
from tests.common.buses import connected, run
from tests.requests import make_request
from tests.scheduler.states import LEASE_S, ready, report_of

PATIENCE_S = 10.0
"""More than anything here takes."""
CONFIG = Config(
    scheduler=SchedulerConfig(prefill_policy="deferred", max_deferred_requests=1),
    predictor=PredictorConfig(kind="none"),
)


@asynccontextmanager
async def busy_scheduler(nats_url: str, redis_url: str, namespace: str) -> AsyncIterator[SchedulerService]:
    """With room for one request to wait. Its only prefill instance takes what it is given."""
    store, subjects = Store(redis_url, namespace), Subjects(namespace)
    state = SchedulerState(LEASE_S, CONFIG.scheduler, waiting=WaitingRoom(1))
    ready(state, p0=900, d0=0)
    tasks = set[asyncio.Task[None]]()

    def spawn(work: Coroutine[None, None, None]) -> None:
        tasks.add(asyncio.create_task(work))

    async def take(task: PrefillTask) -> Acknowledged:
        return Acknowledged()

    async with connected(nats_url, namespace) as bus:
        await bus.serve(subjects.instance_calls(InstanceId("p0")), PrefillTask, take)
        metrics = SchedulerMetrics(new_registry("scheduler"))
        yield SchedulerService(
            "scheduler-0", state, bus, store, subjects, metrics, CONFIG, asyncio.Event(), spawn
        )
    await store.close()


def test_calls_that_are_refused_are_not_held(nats_url: str, redis_url: str, namespace: str) -> None:
    async def work() -> None:
        async with busy_scheduler(nats_url, redis_url, namespace) as scheduler:
            assert await scheduler.submit(SubmitRequest(make_request("r0"))) == Queued()
            for number in range(1, 4):
                with pytest.raises(Overloaded):
                    await scheduler.submit(SubmitRequest(make_request(f"r{number}")))
            assert len(scheduler.turns) == 0

    run(work())


def test_neither_an_earlier_call_that_ends_nor_one_that_comes_late_takes_the_turn(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with busy_scheduler(nats_url, redis_url, namespace) as scheduler:
            earlier, later = (SubmitRequest(make_request("r0", attempt=attempt)) for attempt in (0, 1))
            assert await scheduler.submit(earlier) == Queued()
            given_up = await held(scheduler, earlier)
            waiting = await held(scheduler, later)
            given_up.cancel()
            await asyncio.wait({given_up})
            with pytest.raises(RequestCancelled):
                await scheduler.submit(earlier)
            scheduler._handle(events.LoadReported(report_of("p0", "prefill", 2, pending=0)))
            answer = await waiting
            assert isinstance(answer, Placement)
            assert scheduler.state.is_placed(later.request.request_id, 1)
            assert len(scheduler.turns) == 0

    run(work())


def test_who_waits_where_a_scheduler_leaves_is_told_so_and_who_comes_then_is_placed(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with busy_scheduler(nats_url, redis_url, namespace) as scheduler:
            message = SubmitRequest(make_request("r0"))
            assert await scheduler.submit(message) == Queued()
            waiting = await held(scheduler, message)
            scheduler.turns.leave()
            with pytest.raises(NoInstanceReady, match="shutting down"):
                await waiting
            answer = await scheduler.submit(SubmitRequest(make_request("r1")))
            assert isinstance(answer, Placement)

    run(work())


def test_a_scheduler_takes_calls_once_it_has_heard_the_instances(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    """Until then another one does, which knows whom to give a request."""

    async def work() -> None:
        async with busy_scheduler(nats_url, redis_url, namespace) as scheduler:
            bus, subjects = scheduler.bus, scheduler.subjects
            call = SubmitRequest(make_request("r0"))
            for view in scheduler.state.instances.values():
                view.report = None
            starting = asyncio.create_task(scheduler.start())
            await bus.flush(1.0)
            with pytest.raises(NoResponder):
                await bus.call(subjects.submit(), call, Placement | Queued, 5.0)
            for name, role in (("p0", "prefill"), ("d0", "decode")):
                assert not starting.done()
                bus.publish(subjects.scheduler_events(), report_of(name, role, 2))  # type: ignore[arg-type]
                await bus.flush(1.0)
            await starting
            assert isinstance(await bus.call(subjects.submit(), call, Placement | Queued, 5.0), Placement)

    run(work())


def test_a_scheduler_that_takes_calls_has_been_heard_by_the_others(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    """One that dies before its first heartbeat is then missed, too."""

    async def work() -> None:
        async with (
            busy_scheduler(nats_url, redis_url, namespace) as scheduler,
            connected(nats_url, namespace) as other,
        ):
            heard: list[BookingsChanged] = []
            bookings = scheduler.subjects.scheduler_bookings()
            await other.subscribe(bookings, BookingsChanged, heard.append)
            await scheduler.start()
            await scheduler.bus.flush(5.0)
            await other.flush(5.0)
            assert [each.scheduler_id for each in heard] == ["scheduler-0"]

    run(work())


def test_one_that_waited_at_another_scheduler_is_held_at_once(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    """It knows that it waits: an answer that says so would only be followed by the next call."""

    async def work() -> None:
        async with busy_scheduler(nats_url, redis_url, namespace) as scheduler:
            waiting = await held(scheduler, SubmitRequest(make_request("r0"), waited_s=3.0))
            assert not waiting.done()
            scheduler._handle(events.LoadReported(report_of("p0", "prefill", 2, pending=0)))
            assert isinstance(await waiting, Placement)

    run(work())


def test_how_long_a_request_had_waited_when_it_was_placed_stays_known(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        async with busy_scheduler(nats_url, redis_url, namespace) as scheduler:
            waiting = await held(scheduler, SubmitRequest(make_request("r0"), waited_s=3.0, wanted_for_s=4.0))
            await asyncio.sleep(0.05)
            scheduler._handle(events.LoadReported(report_of("p0", "prefill", 2, pending=0)))
            await waiting
            [decision] = scheduler.state.placer.log.find("r0")
            assert 4.05 <= decision.waited_s < 4.05 + PATIENCE_S

    run(work())


async def held(scheduler: SchedulerService, message: SubmitRequest) -> asyncio.Task[Placement | Queued]:
    """Once its call is."""
    task = asyncio.create_task(scheduler.submit(message))
    await asyncio.sleep(0)
    assert len(scheduler.turns) == 1
    return task
