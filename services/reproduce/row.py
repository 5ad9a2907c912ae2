"""What a reproduced comparison is: a paper's figures and ours side by side, what was run, what it assumes
otherwise than the paper, and why the figures differ where they do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from services.reproduce.data import DataFiles
from services.reproduce.measured import LiveRuns

NOT_MEASURED = (
    "The folder of `--measured` has no runs of this workload by a coupled and by another configuration."
)
PAPER, OURS = "paper", "ours"


@dataclass(frozen=True, slots=True)
class Table:
    """``title``: where it has one."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row = {row}: has not as many cells as there are columns")


@dataclass(frozen=True, slots=True)
class Reproduced:
    """The first of ``tables`` has a column of the paper's and at least one of ours, the others say more.
    ``setup``: what was run here. ``assumptions``: where that is not what the paper ran. ``causes``: of what
    differs. Each is a list of sentences."""

    tables: tuple[Table, ...]
    setup: tuple[str, ...]
    assumptions: tuple[str, ...]
    causes: tuple[str, ...]

    def __post_init__(self) -> None:
        columns = self.tables[0].columns
        if PAPER not in columns or not any(each.startswith(OURS) for each in columns):
            raise ValueError(f"columns = {columns}: paper and ours stand side by side")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. ``files``: that it reads of the data directory. ``run`` gets the share of its usual
    number of requests, 1.0 as documented, less to look fast. ``measured``: the paper's figures beside what
    live meshes of one machine came to, where they can run such a comparison; None: these did not."""

    id: str
    title: str
    source: str
    files: tuple[str, ...]
    run: Callable[[DataFiles, float], Reproduced]
    measured: Callable[[LiveRuns], Table | None] | None = None

    def reproduce(self, files: DataFiles, size: float, live: LiveRuns | None = None) -> Reproduced:
        """With what ``live`` has of it, where that can be measured. Raises ConfigError."""
        found = self.run(files, size)
        if live is None or self.measured is None:
            return found
        table = self.measured(live)
        if table is None:
            return replace(found, setup=(*found.setup, NOT_MEASURED))
        return replace(found, tables=(*found.tables, table))


def sentences(text: str) -> tuple[str, ...]:
    """Paragraphs, each of one line."""
    return tuple(" ".join(each.split()) for each in text.strip().split("\n\n"))


OF_A_WHOLE_RUN = "Our figures in these sentences are of a whole run, this one was of --size {size:g}."


def markdown_of(row: Row, found: Reproduced, size: float) -> str:
    """A section of its own. Causes were found, and are told, of runs of ``size`` 1."""
    told = () if size == 1.0 or not found.causes else (OF_A_WHOLE_RUN.format(size=size),)
    return "\n".join(_lines(row, replace(found, causes=(*found.causes, *told)))) + "\n"


def heading_of(row: Row) -> str:
    return f"## {row.id}: {row.title}\n\n{row.source}.\n"


def _lines(row: Row, found: Reproduced) -> Iterator[str]:
    yield heading_of(row).rstrip("\n")
    for table in found.tables:
        yield ""
        if table.title:
            yield f"**{table.title}**"
            yield ""
        yield f"| {' | '.join(table.columns)} |"
        yield f"|{' --- |' * len(table.columns)}"
        for cells in table.rows:
            yield f"| {' | '.join(cells)} |"
    for heading, sentences in (
        ("What was run", found.setup),
        ("Assumed otherwise than there", found.assumptions),
        ("Why it differs", found.causes),
    ):
        if sentences:
            yield ""
            yield f"{heading}:"
            yield ""
            yield from (f"- {each}" for each in sentences)
