"""How every service answers `lamella trace`: start to record, then give out what was recorded.

::

    command --ReadClock-->  service     several times: the offset between two hosts' clocks
    command --StartTrace--> service     recording ends by itself, whatever becomes of the command
    command --ReadTrace-->  service     in chunks; the first one ends a recording that still runs

What nobody reads is forgotten after ``KEEP_S``.
"""

import asyncio
import time
from functools import cache
from pathlib import Path

import msgspec

from common.bus import Bus
from common.errors import InvalidRequest, Overloaded, UnknownRequest
from common.subjects import Subjects
from common.timeline import Timeline, timeline

MAX_DURATION_S = 600.0
KEEP_S = 60.0
CHUNK_BYTES = 256 << 10
"""Well below the bus's largest message, so that tokens wait for no more than this."""


class ReadClock(msgspec.Struct, frozen=True, tag="trace_clock"):
    """Answered by a ClockRead."""


class ClockRead(msgspec.Struct, frozen=True, tag="trace_clock_read"):
    """``boot_id`` is equal on two hosts exactly when they are one kernel, whose clock all processes share."""

    clock_ns: int
    boot_id: str


class StartTrace(msgspec.Struct, frozen=True, tag="trace_start"):
    """Answered by a TraceStarted, or Overloaded while another trace runs."""

    trace_id: str
    duration_s: float


class TraceStarted(msgspec.Struct, frozen=True, tag="trace_started"):
    """``until_ns`` is on the service's clock."""

    until_ns: int


class ReadTrace(msgspec.Struct, frozen=True, tag="trace_read"):
    """Bytes of the encoded ``Recording`` from ``offset`` on; answered by a TraceChunk."""

    trace_id: str
    offset: int


class TraceChunk(msgspec.Struct, frozen=True, tag="trace_chunk"):
    """At least one byte, and all of them together ``total_bytes``."""

    data: bytes
    total_bytes: int


TraceCall = ReadClock | StartTrace | ReadTrace
TraceReply = ClockRead | TraceStarted | TraceChunk


class Tracing:
    """One a process. Ends what it began: by its own timer, without the command's help."""

    def __init__(self, recorder: Timeline = timeline, keep_s: float = KEEP_S) -> None:
        self._timeline = recorder
        self._keep_s = keep_s
        self._trace_id: str | None = None
        self._encoded: bytes | None = None
        self._encoding = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, bus: Bus, subjects: Subjects, service_id: str) -> None:
        """Returns when the subscription is active."""
        await bus.serve(subjects.trace_calls(service_id), TraceCall, self.answer, max_concurrent=4)

    async def answer(self, call: TraceCall) -> TraceReply:
        match call:
            case ReadClock():
                return ClockRead(time.monotonic_ns(), boot_id())
            case StartTrace():
                return self._start(call)
            case ReadTrace():
                return await self._read(call)

    def _start(self, call: StartTrace) -> TraceStarted:
        if self._timeline.is_on:
            raise Overloaded("another trace is being recorded", retry_after_s=1.0)
        if not 0 < call.duration_s <= MAX_DURATION_S:
            raise InvalidRequest(f"a trace lasts more than 0 and at most {MAX_DURATION_S:g} s")
        self._forget()
        self._trace_id = call.trace_id
        until_ns = self._timeline.start(round(call.duration_s * 1e9))
        self._timer = asyncio.get_running_loop().call_later(call.duration_s, self._stop)
        return TraceStarted(until_ns)

    def _stop(self) -> None:
        self._timeline.stop()
        self._timer = asyncio.get_running_loop().call_later(self._keep_s, self._forget)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timeline.forget()
        self._trace_id = self._encoded = self._timer = None

    async def _read(self, call: ReadTrace) -> TraceChunk:
        """Raises UnknownRequest for a trace that never was here, or is forgotten."""
        async with self._encoding:
            if self._trace_id != call.trace_id:
                raise UnknownRequest(f"trace {call.trace_id} was not recorded here")
            if self._encoded is None:
                recording = self._timeline.take()
                assert recording is not None, "only this object starts and takes"
                # Megabytes: the event loop has tokens to pass on meanwhile.
                encoded = await asyncio.to_thread(msgspec.msgpack.encode, recording)
                if self._trace_id != call.trace_id:
                    raise UnknownRequest(f"trace {call.trace_id} was forgotten")
                self._encoded = encoded
            encoded = self._encoded
        if not 0 <= call.offset < len(encoded):
            raise InvalidRequest(f"byte {call.offset} of {len(encoded)}", param="offset")
        return TraceChunk(encoded[call.offset : call.offset + CHUNK_BYTES], len(encoded))


@cache
def boot_id() -> str:
    """This kernel's, from its start to its end."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
