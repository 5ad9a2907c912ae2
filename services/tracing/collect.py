"""Asks every service of a mesh to record, and gathers what they recorded on one clock: this host's.

Each service is asked on its own, all at once. One that does not answer, dies or restarts meanwhile is
``Silent`` with the reason and costs nobody else anything.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from common.bus import Bus
from common.config import MeshConfig
from common.errors import BusError, LauncherError, RequestError
from common.messages import InstanceRecord, MemberRecord
from common.subjects import Subjects
from common.timeline import Recording
from common.tracing import ClockRead, ReadClock, ReadTrace, StartTrace, TraceChunk, TraceStarted, boot_id
from services.members import members_of

CLOCK_READS = 25
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Clock:
    """A service's clock is ``offset_ns`` ahead of this host's, give or take half of ``round_trip_ns``."""

    offset_ns: int
    round_trip_ns: int


@dataclass(frozen=True, slots=True)
class ServiceTrace:
    """``kind`` is the service's: gateway, scheduler, prefill, decode or attention."""

    service_id: str
    kind: str
    host: str
    pid: int
    clock: Clock
    recording: Recording


@dataclass(frozen=True, slots=True)
class Silent:
    """A service of which there is no record."""

    service_id: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class MeshTrace:
    """``began_ns`` and ``ended_ns`` are on this host's clock and enclose every service's recording."""

    began_ns: int
    ended_ns: int
    services: tuple[ServiceTrace, ...]
    silent: tuple[Silent, ...]


async def collect_trace(mesh: MeshConfig, duration_s: float, stop: asyncio.Event) -> MeshTrace:
    """Records for ``duration_s``, or until ``stop`` is set.

    Raises BusUnavailable, StoreUnavailable, LauncherError where the mesh has no members or none recorded.
    """
    subjects = Subjects(mesh.namespace)
    bus = Bus(mesh.nats_url, name=f"trace-{secrets.token_hex(3)}", subjects=subjects)
    members = await members_of(mesh)
    if not members:
        raise LauncherError(f"no service is registered in mesh {mesh.namespace!r}")
    await bus.connect(CONNECT_TIMEOUT_S)
    try:
        tracer = _Tracer(bus, subjects, secrets.token_hex(4), duration_s, mesh.call_timeout_s, stop)
        found = await asyncio.gather(*(tracer.trace(member) for member in members))
    finally:
        await bus.close()
    services = tuple(each for each in found if isinstance(each, ServiceTrace))
    silent = tuple(each for each in found if isinstance(each, Silent))
    if not services:
        reasons = "; ".join(f"{each.service_id}: {each.reason}" for each in silent)
        raise LauncherError(f"no service recorded: {reasons}")
    return MeshTrace(
        began_ns=min(each.recording.began_ns - each.clock.offset_ns for each in services),
        ended_ns=max(each.recording.ended_ns - each.clock.offset_ns for each in services),
        services=services,
        silent=silent,
    )


@dataclass(frozen=True, slots=True)
class _Tracer:
    bus: Bus
    subjects: Subjects
    trace_id: str
    duration_s: float
    timeout_s: float
    stop: asyncio.Event

    async def trace(self, member: MemberRecord) -> ServiceTrace | Silent:
        """One service's record, from its clock to its last byte."""
        service_id, kind = _name(member)
        subject = self.subjects.trace_calls(service_id)
        try:
            clock = await measure_clock(
                lambda: self.bus.call(subject, ReadClock(), ClockRead, self.timeout_s)
            )
            start = StartTrace(self.trace_id, self.duration_s)
            await self.bus.call(subject, start, TraceStarted, self.timeout_s)
            await self._wait_end()
            recording = await self._read(subject)
        except (BusError, RequestError) as exc:
            return Silent(service_id, kind, str(exc))
        except msgspec.DecodeError as exc:
            return Silent(service_id, kind, f"its record cannot be read: {exc}")
        return ServiceTrace(service_id, kind, member.host, member.pid, clock, recording)

    async def _wait_end(self) -> None:
        try:
            async with asyncio.timeout(self.duration_s):
                await self.stop.wait()
        except TimeoutError:
            return

    async def _read(self, subject: str) -> Recording:
        parts: list[bytes] = []
        size, total_bytes = 0, 1
        while size < total_bytes:
            call = ReadTrace(self.trace_id, size)
            chunk = await self.bus.call(subject, call, TraceChunk, self.timeout_s)
            parts.append(chunk.data)
            size, total_bytes = size + len(chunk.data), chunk.total_bytes
        return msgspec.msgpack.decode(b"".join(parts), type=Recording)


def _name(member: MemberRecord) -> tuple[str, str]:
    """The service's id and kind."""
    if isinstance(member, InstanceRecord):
        return member.instance_id, member.role
    return member.service_id, member.kind


async def measure_clock(read: Callable[[], Awaitable[ClockRead]]) -> Clock:
    """The offset by the fastest of some round trips: half of it is the error's bound.

    Within one kernel, where the measurement allows it, the offset is zero by definition.
    """
    best: Clock | None = None
    answer = ClockRead(0, "")
    for _ in range(CLOCK_READS):
        asked_ns = time.monotonic_ns()
        answer = await read()
        round_trip_ns = time.monotonic_ns() - asked_ns
        if best is None or round_trip_ns < best.round_trip_ns:
            best = Clock(answer.clock_ns - asked_ns - round_trip_ns // 2, round_trip_ns)
    assert best is not None
    if answer.boot_id == boot_id() and abs(best.offset_ns) <= best.round_trip_ns:
        return Clock(0, best.round_trip_ns)
    return best
