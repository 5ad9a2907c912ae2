"""A service records when asked over a real bus, ends by itself, and gives out what it has, once asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from common.bus import Bus
from common.errors import InvalidRequest, Overloaded, UnknownRequest
from common.subjects import Subjects
from common.timeline import Recording, Timeline, define, records_of
from common.tracing import (
    CHUNK_BYTES,
    MAX_DURATION_S,
    ClockRead,
    ReadClock,
    ReadTrace,
    StartTrace,
    TraceCall,
    TraceChunk,
    TraceStarted,
    Tracing,
    boot_id,
)

WORK = define("test work", "compute", "number")
LONG_S = 500.0
WAIT_S = 20.0


class Asking:
    """The command's side."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject

    async def call(self, call: TraceCall, kind: type[msgspec.Struct]) -> msgspec.Struct:
        return await self._bus.call(self._subject, call, kind, WAIT_S)

    async def read(self, trace_id: str, offset: int = 0) -> TraceChunk:
        return await self._bus.call(self._subject, ReadTrace(trace_id, offset), TraceChunk, WAIT_S)

    async def read_all(self, trace_id: str) -> tuple[Recording, int]:
        """What was recorded, and in how many chunks it came."""
        data, chunks = b"", 0
        while True:
            chunk = await self.read(trace_id, len(data))
            data, chunks = data + chunk.data, chunks + 1
            if len(data) == chunk.total_bytes:
                return msgspec.msgpack.decode(data, type=Recording), chunks


@asynccontextmanager
async def traced(
    url: str, namespace: str, recorder: Timeline, keep_s: float = LONG_S
) -> AsyncIterator[Asking]:
    subjects = Subjects(namespace)
    bus = Bus(url, name="traced", subjects=subjects)
    await bus.connect(WAIT_S)
    try:
        await Tracing(recorder, keep_s).serve(bus, subjects, "service-1")
        yield Asking(bus, subjects.trace_calls("service-1"))
    finally:
        await bus.close()


def record(recorder: Timeline, numbers: range) -> None:
    for number in numbers:
        recorder.end(recorder.begin(), WORK, number)


def numbers_of(recording: Recording) -> list[int]:
    return [each.values[0] for thread in recording.threads for each in records_of(thread)]


async def is_kept(asking: Asking, trace_id: str) -> bool:
    """Whether there still is a record, which has nothing of what came after its end."""
    try:
        recording, _ = await asking.read_all(trace_id)
    except UnknownRequest:
        return False
    assert numbers_of(recording) == []
    return True


def test_what_was_recorded_is_given_out_in_chunks(nats_url: str, namespace: str) -> None:
    async def scenario() -> None:
        recorder = Timeline()
        async with traced(nats_url, namespace, recorder) as asking:
            started = await asking.call(StartTrace("t1", LONG_S), TraceStarted)
            count = CHUNK_BYTES // 64 + 10
            record(recorder, range(count))
            recording, chunks = await asking.read_all("t1")
            assert numbers_of(recording) == list(range(count))
            assert chunks > 1
            assert isinstance(started, TraceStarted)
            assert recording.ended_ns < started.until_ns, "reading ended it"
            assert not recorder.is_on
            assert (await asking.read_all("t1"))[0] == recording, "a lost reply can be asked for again"

    asyncio.run(scenario())


def test_it_ends_by_itself_and_is_forgotten_when_nobody_reads_it(nats_url: str, namespace: str) -> None:
    async def scenario() -> None:
        recorder = Timeline()
        async with traced(nats_url, namespace, recorder, keep_s=0.0) as asking:
            await asking.call(StartTrace("t1", 0.01), TraceStarted)
            async with asyncio.timeout(WAIT_S):
                while recorder.is_on:
                    await asking.call(ReadClock(), ClockRead)
                record(recorder, range(3))
                while await is_kept(asking, "t1"):
                    pass
            assert recorder.take() is None

    asyncio.run(scenario())


def test_one_trace_at_a_time(nats_url: str, namespace: str) -> None:
    async def scenario() -> None:
        recorder = Timeline()
        async with traced(nats_url, namespace, recorder) as asking:
            await asking.call(StartTrace("t1", LONG_S), TraceStarted)
            record(recorder, range(2))
            with pytest.raises(Overloaded):
                await asking.call(StartTrace("t2", LONG_S), TraceStarted)
            with pytest.raises(UnknownRequest):
                await asking.read("t2")
            assert numbers_of((await asking.read_all("t1"))[0]) == [0, 1]
            await asking.call(StartTrace("t2", LONG_S), TraceStarted)
            record(recorder, range(5, 6))
            with pytest.raises(UnknownRequest):
                await asking.read("t1")
            assert numbers_of((await asking.read_all("t2"))[0]) == [5]

    asyncio.run(scenario())


@pytest.mark.parametrize("duration_s", [0.0, -1.0, MAX_DURATION_S + 1, float("nan")])
def test_impossible_durations_are_refused(nats_url: str, namespace: str, duration_s: float) -> None:
    async def scenario() -> None:
        recorder = Timeline()
        async with traced(nats_url, namespace, recorder) as asking:
            with pytest.raises(InvalidRequest):
                await asking.call(StartTrace("t1", duration_s), TraceStarted)
            assert not recorder.is_on

    asyncio.run(scenario())


def test_offsets_beyond_the_record_are_refused(nats_url: str, namespace: str) -> None:
    async def scenario() -> None:
        recorder = Timeline()
        async with traced(nats_url, namespace, recorder) as asking:
            await asking.call(StartTrace("t1", LONG_S), TraceStarted)
            total_bytes = (await asking.read("t1")).total_bytes
            for offset in (-1, total_bytes):
                with pytest.raises(InvalidRequest):
                    await asking.read("t1", offset)

    asyncio.run(scenario())


def test_the_clock_is_this_kernel_s(nats_url: str, namespace: str) -> None:
    async def scenario() -> None:
        recorder = Timeline()
        async with traced(nats_url, namespace, recorder) as asking:
            recorder.start(1)
            before_ns = recorder.begin()
            read = await asking.call(ReadClock(), ClockRead)
            assert isinstance(read, ClockRead)
            assert before_ns <= read.clock_ns <= recorder.begin()
            assert read.boot_id == boot_id()

    asyncio.run(scenario())
