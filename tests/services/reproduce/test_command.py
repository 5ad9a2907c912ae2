"""``lamella reproduce``: what it prints, writes and refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from common.errors import ConfigError
from services.cli import app
from services.reproduce.catalogue import ROWS


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_list_has_every_id_and_what_it_reads() -> None:
    result = run("--list")
    assert result.exit_code == 0
    for row in ROWS.values():
        assert row.id in result.output
        assert all(file in result.output for file in row.files)


def test_one_is_printed_with_both_columns() -> None:
    result = run("lamina-table3")
    assert result.exit_code == 0
    assert "paper" in result.output
    assert "ours: roofline" in result.output
    assert "4.90" in result.output


@pytest.mark.parametrize("arguments", [(), ("lamina-table3", "--list"), ("nothing",)])
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, ConfigError)


def test_all_of_them_make_a_document(
    shared_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one, here: each is run by itself in another test."""
    chosen = {"lamina-table3": ROWS["lamina-table3"]}
    for each in list(ROWS):
        monkeypatch.delitem(ROWS, each)
    ROWS.update(chosen)
    document = tmp_path / "reproduction.md"
    data = shared_directory / "data"
    result = run("--all", "--data", data, "--size", "0.5", "--output", document, "--workers", "1")
    assert result.exit_code == 0, result.output
    text = document.read_text()
    assert "lamella reproduce --all --data DIR --size 0.5" in text
    assert "## lamina-table3: " in text
    assert str(data) not in text
