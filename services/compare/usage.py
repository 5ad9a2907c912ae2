"""How long a workload uses the instances of a mesh, and how much of the processor its processes take.

TetriInfer's resource usage time (5.1) is the wall time in which instances are used, summed over them: one
second of prefill and two of decode are three. An instance is used while it has a request; instances report
that whenever it changes, within 20 ms.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.bus import Bus
from common.config import MeshConfig
from common.ids import InstanceId
from common.latency import resource_time_s
from common.messages import LoadReport, SchedulerEvent
from common.subjects import Subjects
from services.bench.config import BenchError

IDLE_TIMEOUT_S = 30.0
COMPUTING = ("engine", "replica", "attention")
"""Names of threads that run the model begin so; other threads that they start inherit theirs."""


class InstanceUse(msgspec.Struct, frozen=True):
    """Seconds. ``span_s``: from first to last use; ``used_s``: of it, with a request."""

    instance_id: InstanceId
    span_s: float
    used_s: float


def is_used(report: LoadReport) -> bool:
    return bool(
        report.pending_prefill_requests
        or report.handovers_waiting
        or report.decode_running
        or report.decode_waiting
    )


@dataclass(slots=True)
class _Spell:
    """``since_s``: it has been used since; None: it is not."""

    first_s: float | None = None
    last_s: float = 0.0
    used_s: float = 0.0
    since_s: float | None = None


@dataclass(slots=True)
class UseRecorder:
    """What instances say of themselves, on one clock."""

    spells: dict[InstanceId, _Spell] = field(default_factory=dict)

    def take(self, report: LoadReport, now_s: float) -> None:
        spell = self.spells.setdefault(report.instance_id, _Spell())
        if is_used(report):
            if spell.since_s is None:
                spell.since_s = now_s
            if spell.first_s is None:
                spell.first_s = now_s
        elif spell.since_s is not None:
            spell.used_s += now_s - spell.since_s
            spell.last_s = now_s
            spell.since_s = None

    @property
    def is_idle(self) -> bool:
        return all(spell.since_s is None for spell in self.spells.values())

    def uses(self) -> list[InstanceUse]:
        """Of idle instances; those that nobody used are not there."""
        return [
            InstanceUse(instance_id, spell.last_s - spell.first_s, spell.used_s)
            for instance_id, spell in sorted(self.spells.items())
            if spell.first_s is not None
        ]


def resource_time_of(uses: Iterable[InstanceUse]) -> float:
    return resource_time_s(use.span_s for use in uses)


@dataclass(frozen=True, slots=True)
class UseWatch:
    """``changed`` is set at every report."""

    recorder: UseRecorder
    changed: asyncio.Event
    instances: int

    async def wait_idle(self) -> None:
        """Returns when every instance has been heard of and none is used. Raises BenchError."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while len(self.recorder.spells) < self.instances or not self.recorder.is_idle:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError as exc:
            used = [name for name, spell in self.recorder.spells.items() if spell.since_s is not None]
            raise BenchError(
                f"{len(self.recorder.spells)} of {self.instances} instances were heard of, and"
                f" {', '.join(used) or 'none'} still used, after {IDLE_TIMEOUT_S} s"
            ) from exc


@asynccontextmanager
async def watch_use(mesh: MeshConfig, instances: int) -> AsyncIterator[UseWatch]:
    """Hears what the mesh's so many instances report. Raises BusUnavailable."""
    subjects = Subjects(mesh.namespace)
    bus = Bus(mesh.nats_url, name="compare", subjects=subjects)
    watch = UseWatch(UseRecorder(), asyncio.Event(), instances)

    def take(event: SchedulerEvent) -> None:
        if isinstance(event, LoadReport):
            watch.recorder.take(event, time.monotonic())
            watch.changed.set()

    await bus.connect()
    try:
        await bus.subscribe(subjects.scheduler_events(), SchedulerEvent, take)
        yield watch
    finally:
        await bus.close()


def processor_s(process_ids: Iterable[int]) -> float:
    """Seconds of one core that these processes have taken so far; of those that are gone, none."""
    return sum(_taken_s(Path(f"/proc/{process_id}/stat")) for process_id in process_ids)


def computing_s(process_ids: Iterable[int]) -> float:
    """Of these, those of threads that run the model."""
    taken_s = 0.0
    for process_id in process_ids:
        for thread in Path(f"/proc/{process_id}/task").glob("*"):
            with suppress(OSError):
                if (thread / "comm").read_text().startswith(COMPUTING):
                    taken_s += _taken_s(thread / "stat")
    return taken_s


def _taken_s(path: Path) -> float:
    try:
        stat = path.read_text()
    except OSError:
        return 0.0
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
