"""What instances have learned of their chunks and steps, by kind: a fresh one is as fast as its like."""

from dataclasses import dataclass, field

import msgspec

from common.messages import LoadReport
from common.performance import FittedTime

Kind = tuple[str, str, str]
"""Model, element type, kind of device: ``InstanceRecord.kind``."""


@dataclass(slots=True)
class LearnedTimes:
    """The newest of each kind. Bounded by the kinds of instances there have been."""

    _chunks: dict[Kind, FittedTime] = field(default_factory=dict)
    _steps: dict[Kind, FittedTime] = field(default_factory=dict)

    def complete(self, kind: Kind, report: LoadReport) -> LoadReport:
        """With its like's times where it has none of its own yet, which say more than a profile: that was
        measured of a machine that did nothing else."""
        chunk_time, step_time = report.chunk_time, report.step_time
        if chunk_time is not None and chunk_time.samples:
            self._chunks[kind] = chunk_time
        else:
            chunk_time = self._chunks.get(kind, chunk_time)
        if step_time is not None and step_time.samples:
            self._steps[kind] = step_time
        else:
            step_time = self._steps.get(kind, step_time)
        if chunk_time is report.chunk_time and step_time is report.step_time:
            return report
        return msgspec.structs.replace(report, chunk_time=chunk_time, step_time=step_time)
