"""What instances have learned of their chunks and steps, by kind: a fresh one is as fast as its like."""

from dataclasses import dataclass, field

import msgspec

from common.messages import InstanceRecord, LoadReport
from common.performance import FittedTime

Kind = tuple[str, str, str]
"""Model, element type, kind of device."""


@dataclass(slots=True)
class LearnedTimes:
    """The newest of each kind. Bounded by the kinds of instances there have been."""

    _chunks: dict[Kind, FittedTime] = field(default_factory=dict)
    _steps: dict[Kind, FittedTime] = field(default_factory=dict)

    def complete(self, record: InstanceRecord, report: LoadReport) -> LoadReport:
        """With its like's times where it has none of its own yet."""
        kind = (record.model, record.dtype, record.device)
        if report.chunk_time is not None:
            self._chunks[kind] = report.chunk_time
        if report.step_time is not None:
            self._steps[kind] = report.step_time
        if report.chunk_time is not None and report.step_time is not None:
            return report
        return msgspec.structs.replace(
            report,
            chunk_time=report.chunk_time or self._chunks.get(kind),
            step_time=report.step_time or self._steps.get(kind),
        )
