"""Plans go out over a real bus, store and HTTP, by who leads; what other schedulers are given counts, too."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import generate_latest

from common.cancellation import cancel_and_wait
from common.config import Config, ScalingConfig
from common.ids import Incarnation, RequestId
from common.messages import RequestEnded
from common.messages.bookings import BookingsChanged
from common.scaling import DesiredCounts
from common.store import Store
from common.subjects import Subjects
from common.telemetry import new_registry
from scheduler import events
from scheduler.metrics import ScalingMetrics
from scheduler.planning import Planner
from scheduler.scaling import Scaling
from scheduler.state import SchedulerState
from tests.common.buses import connected, run, until
from tests.requests import make_request
from tests.scheduler.states import handle
from tests.scheduler.test_bookings import acquainted, tell, word_of

WINDOW_S = 0.2
CONFIG = Config(scaling=ScalingConfig(policy="on", window_s=WINDOW_S))


@asynccontextmanager
async def planning(
    nats_url: str, redis_url: str, namespace: str, state: SchedulerState, epoch: int | None
) -> AsyncIterator[Scaling]:
    store, subjects = Store(redis_url, namespace), Subjects(namespace)
    async with connected(nats_url, namespace) as bus:
        planner = Planner(CONFIG, asyncio.get_running_loop().time())
        metrics = ScalingMetrics(new_registry("scheduler"))
        scaling = Scaling(planner, state, bus, store, subjects, metrics, CONFIG, lambda: epoch)
        try:
            yield scaling
        finally:
            await store.close()


def test_who_leads_publishes_its_plans_over_bus_store_http_and_metrics(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        [state] = acquainted("a")
        async with planning(nats_url, redis_url, namespace, state, 7) as scaling:
            registry = new_registry("scheduler")
            scaling.metrics = ScalingMetrics(registry)
            heard: list[DesiredCounts] = []
            await scaling.bus.subscribe(scaling.subjects.scaling(), DesiredCounts, heard.append)
            scaling.note_submitted(make_request("r1", 500))
            scaling.note_submitted(make_request("r1", 500, attempt=1))
            scaling.note_ended(RequestEnded(RequestId("r1"), 500, 40))
            scaling.note_ended(RequestEnded(RequestId("r2"), 500, None))
            task = asyncio.create_task(scaling.run())
            await until(lambda: len(heard) >= 2, scaling.bus)
            await cancel_and_wait(task)
            first = heard[0]
            assert (first.epoch, first.prompt_tokens, first.output_tokens) == (7, 500.0, 40.0)
            assert 0 < first.rate_per_s <= 1 / WINDOW_S, "windows are at least as long"
            assert scaling.planner.profiler.workload is not None
            assert scaling.planner.profiler.workload.arrivals == 1, "of two attempts"
            assert {each.service: (each.current, each.desired) for each in first.counts} == {
                "gateway": (1, 1),
                "prefill": (2, 2),
                "decode": (2, 2),
            }
            assert await scaling.store.read_plan() in heard
            assert 'lamella_workers_desired{service="decode"} 2.0' in generate_latest(registry).decode()
            assert (await shown(scaling))["epoch"] == 7

    run(work())


def test_who_does_not_lead_publishes_nothing_and_goes_on_counting(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        [state] = acquainted("a")
        async with planning(nats_url, redis_url, namespace, state, None) as scaling:
            scaling.note_submitted(make_request("r1", 500))
            task = asyncio.create_task(scaling.run())
            await until(lambda: scaling.planner.profiler.workload is not None, scaling.bus)
            await cancel_and_wait(task)
            assert await scaling.store.read_plan() is None
            assert scaling.latest is None

    run(work())


def test_a_request_that_another_scheduler_was_given_is_counted_once(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        a, b = acquainted("a", "b")
        async with planning(nats_url, redis_url, namespace, a, 7) as scaling:
            for name in ("r1", "r2"):
                b.place(make_request(name, 300), 0.0)
            message = word_of(b)
            hear(scaling, message)
            handle(b, events.TaskAcknowledged(RequestId("r1"), 0))
            hear(scaling, word_of(b))
            hear(scaling, message)
            a.place(make_request("r3", 100), 0.0)
            hear(scaling, word_of(a))
            tell(b, a)
            scaling.planner.profiler.close(asyncio.get_running_loop().time() + 1.0)
            workload = scaling.planner.profiler.workload
            assert workload is not None
            assert (workload.arrivals, workload.prompts.mean) == (2, 300.0)

    run(work())


def test_one_that_waits_here_and_is_booked_elsewhere_is_counted_once(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    async def work() -> None:
        a, b = acquainted("a", "b")
        async with planning(nats_url, redis_url, namespace, a, 7) as scaling:
            request = make_request("r1", 300)
            scaling.note_submitted(request)
            a.waiting.enter(request, 0.0)
            b.place(request, 0.0)
            hear(scaling, word_of(b))
            scaling.planner.profiler.close(asyncio.get_running_loop().time() + 1.0)
            workload = scaling.planner.profiler.workload
            assert workload is not None
            assert workload.arrivals == 1

    run(work())


def hear(scaling: Scaling, message: BookingsChanged) -> None:
    """As the service does."""
    assert message.incarnation in (Incarnation("a"), Incarnation("b"))
    scaling.note_peer(message)
    handle(scaling.state, events.PeerHeard(message))


async def shown(scaling: Scaling) -> dict[str, object]:
    """What ``/scaling`` answers."""
    app = FastAPI()
    scaling.add_routes(app)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/scaling", "query_string": b"", "headers": []}
    await app(scope, receive, send)  # type: ignore[arg-type]  # ASGI's own types are looser
    body: dict[str, object] = json.loads(sent[1]["body"])  # type: ignore[arg-type]  # it is bytes
    return body


def test_one_that_is_booked_elsewhere_by_a_later_attempt_is_counted_once(
    nats_url: str, redis_url: str, namespace: str
) -> None:
    """r1's first attempt was refused by a scheduler that has told nobody, r2's by this one, and r3's died
    with the scheduler that had it, which its gateway says by an end. r4 is booked again elsewhere."""

    async def work() -> None:
        a, b = acquainted("a", "b")
        async with planning(nats_url, redis_url, namespace, a, 7) as scaling:
            scaling.note_submitted(make_request("r2", 300))
            scaling.note_ended(RequestEnded(RequestId("r3"), attempt=0))
            handle(a, events.RequestOver(RequestId("r3"), attempt=0))
            for name in ("r1", "r2", "r3"):
                b.place(make_request(name, 300, attempt=1), 0.0)
                hear(scaling, word_of(b))
            a.place(make_request("r4", 300), 0.0)
            b.place(make_request("r4", 300, attempt=1), 0.0)
            hear(scaling, word_of(b))
            scaling.planner.profiler.close(asyncio.get_running_loop().time() + 1.0)
            workload = scaling.planner.profiler.workload
            assert workload is not None
            assert workload.arrivals == 3

    run(work())
