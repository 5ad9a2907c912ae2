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
        """With its like's times where it has none of its own yet, which say more than a profile: that was
        measured of a machine that did nothing else."""
        kind = (record.model, record.dtype, record.device)
        chunk_time = _newest(self._chunks, kind, report.chunk_time)
        step_time = _newest(self._steps, kind, report.step_time)
        if chunk_time is report.chunk_time and step_time is report.step_time:
            return report
        return msgspec.structs.replace(report, chunk_time=chunk_time, step_time=step_time)


def _newest(learned: dict[Kind, FittedTime], kind: Kind, told: FittedTime | None) -> FittedTime | None:
    if told is None or not told.samples:
        return learned.get(kind, told)
    learned[kind] = told
    return told
