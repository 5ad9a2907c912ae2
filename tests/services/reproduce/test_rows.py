"""Every comparison runs, small, and prints the paper's figures beside ours."""

from pathlib import Path

import pytest

from services.reproduce.catalogue import ROWS
from services.reproduce.data import DataFiles
from services.reproduce.row import OURS, PAPER, markdown_of

SMALL = 0.02
DOCUMENT = Path(__file__).resolve().parents[3] / "docs/reproduction.md"


@pytest.mark.parametrize("row_id", ROWS)
def test_a_row_prints_the_paper_beside_ours(shared_directory: Path, row_id: str) -> None:
    row = ROWS[row_id]
    found = row.run(DataFiles(shared_directory / "data"), SMALL)
    assert all((found.tables, found.setup, found.assumptions, found.causes))
    table = found.tables[0]
    paper = table.columns.index(PAPER)
    ours = next(place for place, each in enumerate(table.columns) if each.startswith(OURS))
    for place in (paper, ours):
        assert any(character.isdigit() for cells in table.rows for character in cells[place])
    text = markdown_of(row, found, SMALL)
    assert text.startswith(f"## {row.id}: {row.title}\n")
    assert "Why it differs:" in text


def test_causes_of_a_smaller_run_say_that_their_figures_are_of_a_whole_one() -> None:
    row = ROWS["lamina-table3"]
    found = row.run(DataFiles(None), 1.0)
    whole, half = (markdown_of(row, found, size) for size in (1.0, 0.5))
    assert whole.splitlines()[-1] == f"- {found.causes[-1]}"
    said = "- Our figures in these sentences are of a whole run, this one was of --size 0.5.\n"
    assert half == whole + said


def test_the_document_has_every_row_of_a_whole_run() -> None:
    text = DOCUMENT.read_text()
    assert "--size" not in text
    for row in ROWS.values():
        assert f"\n## {row.id}: {row.title}\n" in text
