"""The files that ``lamella simulate`` is asked for: tried before anything is run, written once all has."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.errors import ConfigError
from common.latency import ServiceObjectives
from services.output_files import check_writable, is_stream, write_whole
from services.simulator.cluster import Cluster
from services.simulator.records import Records
from services.simulator.request_files import (
    RequestTable,
    check_parquet,
    csv_of,
    parquet_of,
    request_table,
)
from services.simulator.tables import Run
from services.simulator.timeline import SimulatedTimeline
from services.simulator.timeline_file import write_timeline

PICTURES = (".png", ".svg", ".pdf")


@dataclass(slots=True)
class OutputFiles:
    """None: not asked for. ``recorded``: for runs to keep what everyone did."""

    json: Path | None
    csv: Path | None
    parquet: Path | None
    plot: Path | None
    timeline: Path | None
    recorded: SimulatedTimeline | None = field(init=False)
    _tables: dict[str, RequestTable] = field(default_factory=dict)
    _records: dict[str, Records] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recorded = None if self.timeline is None else SimulatedTimeline()

    def check(self, configurations: int) -> None:
        """Raises ConfigError."""
        if self.json is not None:
            check_writable("--json", self.json)
        if self.csv is not None:
            check_writable("--csv", self.csv)
        if self.parquet is not None:
            check_parquet(self.parquet)
            check_writable("--parquet", self.parquet)
        if self.plot is not None:
            check_plot(self.plot)
        if self.timeline is not None:
            if configurations > 1:
                rule = "is of one configuration: leave --compare out"
                raise ConfigError("--timeline", str(self.timeline), rule)
            check_writable("--timeline", self.timeline)
        self._check_apart()

    def _check_apart(self) -> None:
        """The later one would replace the former; what only takes bytes takes those of both."""
        taken: dict[Path, str] = {}
        for name in ("json", "csv", "parquet", "plot", "timeline"):
            option, path = f"--{name}", getattr(self, name)
            if path is None or is_stream(option, path):
                continue
            file = path.resolve()
            if file in taken:
                raise ConfigError(option, str(path), f"is the file of {taken[file]}, too")
            taken[file] = option

    def take(self, name: str, cluster: Cluster) -> None:
        """A run that is over. Its timeline is written, of all else what is needed is kept."""
        if self.plot is not None:
            self._records[name] = cluster.records
        if self.csv is not None or self.parquet is not None or self.plot is not None:
            self._tables[name] = request_table(name, cluster)
        if self.timeline is not None and self.recorded is not None:
            write_timeline(self.timeline, cluster, self.recorded)

    def write(self, runs: Sequence[Run], objectives: ServiceObjectives | None) -> None:
        """Raises ConfigError."""
        tables = list(self._tables.values())
        if self.json is not None:
            write_whole("--json", self.json, json_of(runs))
        if self.csv is not None:
            write_whole("--csv", self.csv, csv_of(tables))
        if self.parquet is not None:
            write_whole("--parquet", self.parquet, parquet_of(tables))
        if self.plot is not None:
            from services.simulator.plot import write_plot

            write_plot(self.plot, self._tables, self._records, objectives)


def check_plot(path: Path) -> None:
    """Raises ConfigError."""
    if path.suffix not in PICTURES:
        raise ConfigError("--plot", str(path), "must end in .png, .svg or .pdf")
    check_writable("--plot", path)


def json_of(runs: Sequence[Run]) -> bytes:
    """One run's metrics; of several, each run's by its name."""
    content = runs[0].metrics if len(runs) == 1 else {run.name: run.metrics for run in runs}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
