"""What live meshes did of a comparison that runs on one machine: a folder of ``lamella compare``."""

from pathlib import Path

import msgspec

from common.errors import ConfigError
from services.compare.figures import Cell
from services.compare.records import RunRecord
from services.compare.run import RUNS_FILE


class LiveRuns:
    """All records of a folder, whichever comparison's they are."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError."""
        self.directory = directory
        file = directory / RUNS_FILE
        try:
            lines = file.read_bytes().splitlines()
        except OSError as exc:
            rule = f"must be a folder of `lamella compare`: {RUNS_FILE} cannot be read ({exc.strerror})"
            raise ConfigError("--measured", str(directory), rule) from exc
        self._cells: dict[tuple[str, str], list[RunRecord]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                record = msgspec.json.decode(line, type=RunRecord)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                rule = f"{RUNS_FILE}, line {number}, is no run of `lamella compare` ({exc})"
                raise ConfigError("--measured", str(directory), rule) from exc
            self._cells.setdefault((record.workload, record.configuration), []).append(record)

    def cells_of(self, workload: str) -> list[Cell]:
        """By configuration, in the order of their first runs. Raises ConfigError where there is none."""
        found = [
            Cell(name, configuration, tuple(runs))
            for (name, configuration), runs in self._cells.items()
            if name == workload
        ]
        if not found:
            has = ", ".join(dict.fromkeys(name for name, _ in self._cells)) or "none at all"
            raise ConfigError(
                "--measured", str(self.directory), f"has no run of the workload {workload}: {has}"
            )
        return found
