"""Who is told to be over, over real connections and a real bus."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from common.bus import Bus
from common.errors import InternalError
from common.ids import Incarnation
from common.messages import Acknowledged, InstanceCall, InstanceRecord, MemberRecord, ServiceRecord
from common.messages.attention import AttentionCall
from common.subjects import Subjects
from scheduler.lifelines import Lifelines
from tests.common.buses import connected, run, until
from tests.scheduler.states import record_of

HOST = "127.0.0.1"


async def acknowledge() -> Acknowledged:
    return Acknowledged()


async def fail() -> Acknowledged:
    raise InternalError("of an older kind, which knows no such call")


async def hang() -> Acknowledged:
    await asyncio.Event().wait()
    raise AssertionError("nobody wakes it")


def count_tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """To where a connection was asked for, since now."""
    found: list[Any] = []
    connect = asyncio.open_connection

    async def counted(*address: Any, **options: Any) -> Any:
        found.append(address)
        return await connect(*address, **options)

    monkeypatch.setattr(asyncio, "open_connection", counted)
    return found


class Instance:
    """A port that says nothing, and calls that are answered on a connection to NATS of its own."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus, self.subjects = bus, subjects
        self.lines: list[asyncio.StreamWriter] = []
        self.came = 0
        self.calls = 0
        self.answer: Callable[[], Awaitable[Acknowledged]] = acknowledge
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
        return await self.answer()


class Watched:
    def __init__(self, bus: Bus, subjects: Subjects, instance: Instance) -> None:
        self.instance = instance
        self.told: list[MemberRecord] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.lifelines = Lifelines(bus, subjects, self.told.append, self.spawn, retry_s=0.01)

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


def test_who_closes_and_is_served_by_nobody_is_over_and_told_of_once(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = count_tries(monkeypatch)

    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            assert found.lifelines.open == 1
            await found.instance.bus.close()
            await found.instance.close_port()
            await until(lambda: found.told, found.lifelines.bus)
            # The store has the record for a while yet, and it is tried again and again.
            found.lifelines.keep([found.instance.record])
            told_at = len(tries)
            await until(lambda: len(tries) > told_at + 3, found.lifelines.bus)
            assert found.told == [found.instance.record]
            assert len(found.tasks) == 1
            assert found.lifelines.open == 0

    run(work())


def test_a_call_that_nobody_answers_says_nothing_yet(nats_url: str, namespace: str) -> None:
    """It went to a process as it died. That NATS has seen its end says so."""

    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            found.instance.answer = hang
            await found.instance.close_port()
            await until(lambda: found.instance.calls == 2, found.lifelines.bus)
            assert found.told == []
            await found.instance.bus.close(timeout_s=0.1)
            await until(lambda: found.told, found.lifelines.bus)

    run(work())


@pytest.mark.parametrize("answer", [acknowledge, fail])
def test_who_answers_on_the_bus_lives_whatever_its_port_does(
    nats_url: str, namespace: str, answer: Callable[[], Awaitable[Acknowledged]]
) -> None:
    """Also where it knows no such question. It is watched as before once it listens again."""

    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            found.instance.answer = answer
            await found.instance.close_port()
            await until(lambda: found.instance.calls, found.lifelines.bus)
            await found.lifelines.bus.flush()
            assert found.told == []
            await found.instance.listen()
            await until(lambda: found.instance.came == 2, found.lifelines.bus)
            await found.instance.bus.close()
            await found.instance.close_port()
            await until(lambda: found.told, found.lifelines.bus)

    run(work())


def test_a_bus_that_is_away_says_nothing(nats_url: str, namespace: str) -> None:
    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            await found.lifelines.bus.close()
            await found.instance.bus.close()
            await found.instance.close_port()
            await found.instance.listen()
            async with connected(nats_url, namespace) as other:
                await until(lambda: found.instance.came == 2, other)
            assert found.told == []

    run(work())


def test_who_was_never_reached_is_told_of_by_nobody(
    nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall refuses, and NATS begins anew: its silence alone may say that it is gone. That it is not
    watched is said, once for each; as of addresses that are none."""
    tries = count_tries(monkeypatch)

    async def work() -> None:
        async with watched(nats_url, namespace) as found:
            names = {"d1": f"http://{HOST}:1", "d2": "", "d3": "http://fd00::1:8000", "d4": "http://a..b:1"}
            others = [
                msgspec.structs.replace(record_of(name, "decode"), http_url=url)
                for name, url in names.items()
            ]
            before = len(tries)
            found.lifelines.keep([found.instance.record, *others])
            await until(lambda: len(tries) > before + 4 * len(others), found.lifelines.bus)
            assert found.told == []
            unreachable = [each for each in caplog.records if each.message == "port_unreachable"]
            assert sorted(each.__dict__["member"] for each in unreachable) == sorted(names)
            assert found.lifelines.open == 1

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


def test_of_an_attention_worker_s_end_it_is_told_as_its_newest_record_is(
    nats_url: str, namespace: str
) -> None:
    """It may have begun to drain since it was first seen."""
    subjects, calls = Subjects(namespace), list[AttentionCall]()

    async def answer(call: AttentionCall) -> Acknowledged:
        calls.append(call)
        return Acknowledged()

    async def work() -> None:
        async with watched(nats_url, namespace) as found, connected(nats_url, namespace, "a0") as own:
            worker = Instance(own, subjects)
            await own.serve(subjects.attention_calls("a0"), AttentionCall, answer)
            await worker.listen()
            url = f"http://{HOST}:{worker.port}"
            record = ServiceRecord(
                service_id="a0",
                incarnation=Incarnation("life"),
                kind="attention",
                host=HOST,
                pid=1,
                http_url=url,
            )
            gateway = msgspec.structs.replace(record, service_id="g0", kind="gateway")
            found.lifelines.keep([found.instance.record, record, gateway])
            await until(lambda: worker.came == 1, found.lifelines.bus)
            assert len(found.tasks) == 2, "nobody keeps one to a gateway"
            await worker.close_port()
            await until(lambda: calls, found.lifelines.bus)
            assert found.told == [], "it answers on the bus"
            await worker.listen()
            await until(lambda: worker.came == 2, found.lifelines.bus)
            leaving = msgspec.structs.replace(record, is_draining=True)
            found.lifelines.keep([found.instance.record, leaving])
            await own.close()
            await worker.close_port()
            await until(lambda: found.told, found.lifelines.bus)
            assert found.told == [leaving]

    run(work())
