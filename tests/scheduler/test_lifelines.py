"""Who is told to be over, over real connections and a real bus."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import msgspec

from common.bus import Bus
from common.errors import InternalError
from common.messages import Acknowledged, InstanceCall, InstanceLife, InstanceRecord
from common.subjects import Subjects
from scheduler.lifelines import Lifelines
from tests.common.buses import connected, run, until
from tests.scheduler.states import record_of

HOST = "127.0.0.1"


class Instance:
    """A port that says nothing, and calls that are answered on a connection to NATS of its own."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus, self.subjects = bus, subjects
        self.lines: list[asyncio.StreamWriter] = []
        self.came = 0
        self.calls = 0
        self.is_failing = False
        self.port = 0

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self._take, HOST, self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def serve(self) -> None:
        await self.bus.serve(
            self.subjects.instance_calls(self.record.instance_id), InstanceCall, self._answer
        )

    @property
    def record(self) -> InstanceRecord:
        record = record_of("d0", "decode")
        return msgspec.structs.replace(record, http_url=f"http://{HOST}:{self.port}")

    async def close_port(self) -> None:
        self.server.close()
        await self.drop_lines()

    async def drop_lines(self) -> None:
        for each in self.lines:
            each.close()
        self.lines.clear()

    async def _take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lines.append(writer)
        self.came += 1

    async def _answer(self, call: InstanceCall) -> Acknowledged:
        self.calls += 1
        if self.is_failing:
            raise InternalError("of an older kind, which knows no such call")
        return Acknowledged()


class Watched:
    def __init__(self, bus: Bus, subjects: Subjects, instance: Instance) -> None:
        self.instance = instance
        self.told: list[InstanceLife] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.lifelines = Lifelines(bus, subjects, self.told.append, self.spawn)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self.tasks.add(asyncio.create_task(work))


@asynccontextmanager
async def watched(nats_url: str, namespace: str) -> AsyncIterator[Watched]:
    subjects = Subjects(namespace)
    async with connected(nats_url, namespace, "d0") as own, connected(nats_url, namespace, "s0") as bus:
        instance = Instance(own, subjects)
        await instance.listen()
        await instance.serve()
        found = Watched(bus, subjects, instance)
        found.lifelines.keep([instance.record])
        await until(lambda: instance.came == 1, bus)
        yield found
        found.lifelines.keep([])
        for task in found.tasks:
            task.cancel()
        await asyncio.gather(*found.tasks, return_exceptions=True)
        await instance.close_port()
    assert [task for task in found.tasks if not task.cancelled() and task.exception()] == []


def test_who_refuses_and_is_served_by_nobody_is_over_and_told_of_once(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            await found.instance.bus.close()
            await found.instance.close_port()
            await until(lambda: found.told, found.lifelines.bus)
            # The store has the record for a while yet.
            found.lifelines.keep([found.instance.record])
            await asyncio.sleep(0.1)
            assert found.told == [found.instance.record.life]
            assert len(found.tasks) == 1

    run(work())


def test_who_answers_on_the_bus_lives_whatever_its_port_does(nats_url: str, namespace: str) -> None:
    """Also where it knows no such question."""

    async def work() -> None:
        for is_failing in (False, True):
            async with watched(nats_url, namespace + str(is_failing)) as found:
                found.instance.is_failing = is_failing
                await found.instance.close_port()
                await until(lambda: found.instance.calls, found.lifelines.bus)
                await found.lifelines.bus.flush()
                assert found.told == []
                # It is watched as before once it listens again.
                await found.instance.listen()
                await until(lambda: found.instance.came == 2, found.lifelines.bus)
                await found.instance.bus.close()
                await found.instance.close_port()
                await until(lambda: found.told, found.lifelines.bus)

    run(work())


def test_a_connection_that_somebody_closes_is_opened_again(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            await found.instance.bus.close()
            await found.instance.drop_lines()
            await until(lambda: found.instance.came == 2, found.lifelines.bus)
            assert found.told == []

    run(work())


def test_who_is_no_member_any_more_is_watched_no_more(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            found.lifelines.keep([])
            [task] = found.tasks
            await asyncio.wait({task})
            await found.instance.bus.close()
            await found.instance.close_port()
            assert found.told == []

    run(work())


def test_an_address_that_is_none_is_not_watched(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            found.lifelines.keep([found.instance.record, record_of("d1", "decode")])
            assert len(found.tasks) == 1

    run(work())
