"""What instances have learned of their chunks and steps, by kind: a fresh one is as fast as its like."""

from dataclasses import dataclass, field

from common.messages import LoadReport
from common.performance import FittedTime

Kind = tuple[str, str, str]
"""Model, element type, kind of device: ``InstanceRecord.kind``."""


@dataclass(slots=True)
class KindTimes:
    """The newest that instances of one kind have learned."""

    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None

    def take(self, report: LoadReport) -> None:
        """One of that kind."""
        chunk_time, step_time = report.chunk_time, report.step_time
        if chunk_time is not None and chunk_time.samples:
            self.chunk_time = chunk_time
        if step_time is not None and step_time.samples:
            self.step_time = step_time

    def of_chunks(self, own: FittedTime | None) -> FittedTime | None:
        """An instance's own times; where it has none yet its like's, which say more than a profile: that was
        measured of a machine that did nothing else."""
        return own if self.chunk_time is None or (own is not None and own.samples) else self.chunk_time

    def of_steps(self, own: FittedTime | None) -> FittedTime | None:
        """The same of steps."""
        return own if self.step_time is None or (own is not None and own.samples) else self.step_time


@dataclass(slots=True)
class LearnedTimes:
    """Of each kind. Bounded by the kinds of instances there have been."""

    _kinds: dict[Kind, KindTimes] = field(default_factory=dict)

    def of(self, kind: Kind) -> KindTimes:
        return self._kinds.setdefault(kind, KindTimes())
