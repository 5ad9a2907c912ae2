"""Tables that a user names: CSV, plain or gzipped. What breaks a rule is refused by file, column and row."""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import ServiceError, reason_of

FloatArray = npt.NDArray[np.float64]
GZIP_SUFFIX = ".gz"
FIRST_ROW = 2
"""Of data, as editors number lines: the header is 1."""
NAMED_CHOICES = 8


class PerformanceFileError(ServiceError):
    """A file of measurements breaks a rule. ``where``: the column and row, or the key."""

    def __init__(self, path: Path, where: str, rule: str) -> None:
        super().__init__(f"{path}: {where}: {rule}" if where else f"{path}: {rule}")
        self.path = path
        self.where = where
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Table:
    """Some rows of a file, with ``rows`` their line numbers in it. Cells are text until they are asked
    for."""

    path: Path
    columns: Mapping[str, Sequence[str]]
    rows: Sequence[int]

    def texts(self, column: str) -> Sequence[str]:
        try:
            return self.columns[column]
        except KeyError:
            known = ", ".join(sorted(self.columns)[:NAMED_CHOICES])
            raise PerformanceFileError(self.path, f"column {column}", f"is missing; has {known} …") from None

    def numbers(self, column: str, *, above: float = -math.inf, least: float = -math.inf) -> FloatArray:
        """Finite, > ``above`` and ≥ ``least``."""
        texts = self.texts(column)
        try:
            values = np.array(texts, dtype=np.float64)
        except ValueError:
            bad = next(index for index, text in enumerate(texts) if not _is_number(text))
            raise self._error(column, bad, "must be a number") from None
        is_good = np.isfinite(values) & (values > above) & (values >= least)
        if not is_good.all():
            rule = "must be finite"
            if above > -math.inf:
                rule = f"must be a number over {above:g}"
            elif least > -math.inf:
                rule = f"must be a number of at least {least:g}"
            raise self._error(column, int(np.argmin(is_good)), rule)
        return values

    def select(self, **wanted: str | float) -> "Table":
        """The rows with these values: a text's very letters, or equal numbers. Raises where there is none."""
        chosen = self
        for column, value in wanted.items():
            texts = chosen.texts(column)
            if isinstance(value, str):
                kept = [index for index, text in enumerate(texts) if text == value]
            else:
                kept = np.flatnonzero(chosen.numbers(column) == value).tolist()
            if not kept:
                known = list(dict.fromkeys(texts))
                more = " …" if len(known) > NAMED_CHOICES else ""
                rule = f"has no row with {value!r}; has {', '.join(known[:NAMED_CHOICES])}{more}"
                raise PerformanceFileError(chosen.path, f"column {column}", rule)
            chosen = chosen.take(kept)
        return chosen

    def take(self, kept: Iterable[int]) -> "Table":
        indexes = list(kept)
        columns = {name: [cells[index] for index in indexes] for name, cells in self.columns.items()}
        return Table(self.path, columns, [self.rows[index] for index in indexes])

    def _error(self, column: str, index: int, rule: str) -> PerformanceFileError:
        where = f"column {column}, row {self.rows[index]}"
        return PerformanceFileError(self.path, where, f"{self.columns[column][index]!r}: {rule}")


def read_table(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Table:
    """These columns of a CSV file; of ``optional`` those that it has."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == GZIP_SUFFIX else content).decode()
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except (OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error) as exc:
        raise PerformanceFileError(path, "", f"cannot be read: {reason_of(exc)}") from exc
    if not lines:
        raise PerformanceFileError(path, "", "is empty")
    header, *body = lines
    missing = [name for name in columns if name not in header]
    if missing:
        rule = f"is missing; the header has {', '.join(header[:NAMED_CHOICES])} …"
        raise PerformanceFileError(path, f"column {missing[0]}", rule)
    for row, cells in enumerate(body, FIRST_ROW):
        if len(cells) != len(header):
            rule = f"has {len(cells)} cells, the header {len(header)}"
            raise PerformanceFileError(path, f"row {row}", rule)
    if not body:
        raise PerformanceFileError(path, "", "has a header and no rows")
    wanted = [*columns, *(name for name in optional if name in header)]
    places = {name: header.index(name) for name in wanted}
    cells_of = {name: [cells[place] for cells in body] for name, place in places.items()}
    return Table(path, cells_of, range(FIRST_ROW, FIRST_ROW + len(body)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
