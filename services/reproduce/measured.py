"""What live meshes did of a comparison that runs on one machine: a folder of ``lamella compare``."""

from pathlib import Path

from common.errors import ConfigError
from services.compare.figures import Cell
from services.compare.records import RUNS_FILE, RunRecord, read_kept

COUPLED = ("coupled-prefill-first", "coupled")
"""What others are held against: prompts first, as vLLM did it, where there are several."""


class LiveRuns:
    """All records of a folder, whichever comparison's they are."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError."""
        file = directory / RUNS_FILE
        if not file.is_file():
            rule = f"must be a folder of `lamella compare`: it has no {RUNS_FILE}"
            raise ConfigError("--measured", str(directory), rule)
        self._cells: dict[tuple[str, str], list[RunRecord]] = {}
        for record in read_kept(file, RunRecord, None, "--measured"):
            self._cells.setdefault((record.workload, record.configuration), []).append(record)

    def beside_coupled(self, workload: str) -> tuple[Cell, list[Cell]] | None:
        """The coupled configuration's runs, and the others'; None where there are not both."""
        cells = {
            configuration: Cell(name, configuration, tuple(runs))
            for (name, configuration), runs in sorted(self._cells.items())
            if name == workload
        }
        coupled = next((cells.pop(each) for each in COUPLED if each in cells), None)
        return None if coupled is None or not cells else (coupled, list(cells.values()))
