"""What instances have learned of their chunks and steps, by kind: a fresh one is as fast as its like."""

from dataclasses import dataclass, field

import msgspec

from common.messages import LoadReport
from common.performance import FittedTime

Kind = tuple[str, str, str]
"""Model, element type, kind of device: ``InstanceRecord.kind``."""


@dataclass(slots=True)
class KindTimes:
    """The newest that instances of one kind have learned."""

    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None

    def complete(self, report: LoadReport) -> LoadReport:
        """One of that kind, with its like's times where it has none of its own yet, which say more than a
        profile: that was measured of a machine that did nothing else."""
        chunk_time, step_time = own = report.chunk_time, report.step_time
        if chunk_time is not None and chunk_time.samples:
            self.chunk_time = chunk_time
        elif self.chunk_time is not None:
            chunk_time = self.chunk_time
        if step_time is not None and step_time.samples:
            self.step_time = step_time
        elif self.step_time is not None:
            step_time = self.step_time
        if chunk_time is own[0] and step_time is own[1]:
            return report
        return msgspec.structs.replace(report, chunk_time=chunk_time, step_time=step_time)


@dataclass(slots=True)
class LearnedTimes:
    """Of each kind. Bounded by the kinds of instances there have been."""

    _kinds: dict[Kind, KindTimes] = field(default_factory=dict)

    def of(self, kind: Kind) -> KindTimes:
        return self._kinds.setdefault(kind, KindTimes())
