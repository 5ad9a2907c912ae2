"""``lamella reproduce``: what it prints, writes and refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from common.errors import ConfigError
from services.cli import app
from services.reproduce.catalogue import ROWS, rows_of


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


def test_a_paper_s_figures_are_named_together() -> None:
    assert [row.id for row in rows_of("tetriinfer-fig11-15")] == [
        f"tetriinfer-fig{number}" for number in range(11, 16)
    ]
    assert [row.id for row in rows_of("aladdin-fig11-12")] == ["aladdin-fig11", "aladdin-fig12"]
    assert rows_of("splitwise-fig16") == [ROWS["splitwise-fig16"]]


@pytest.mark.parametrize(
    "arguments",
    [(), ("lamina-table3", "--list"), ("nothing",), ("tetriinfer-fig1-9",), ("nothing-fig11-15",)],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, ConfigError)


def test_a_row_that_cannot_be_run_is_told_and_leaves_the_others(
    tmp_path: Path, keep_rows: Callable[..., None]
) -> None:
    keep_rows("lamina-table3", "vidur-fig1a")
    document = tmp_path / "reproduction.md"
    result = run("--all", "--data", tmp_path, "--output", document, "--workers", "1")
    assert result.exit_code == 1
    assert "not run: " in result.output
    text = document.read_text()
    assert "4.90" in text
    assert "## vidur-fig1a: " in text
    assert "Could not be run: " in text


def test_all_of_them_make_a_document(
    shared_directory: Path, tmp_path: Path, keep_rows: Callable[..., None]
) -> None:
    """Of one, here: each is run by itself in another test."""
    keep_rows("lamina-table3")
    document = tmp_path / "reproduction.md"
    data = shared_directory / "data"
    result = run("--all", "--data", data, "--size", "0.5", "--output", document, "--workers", "1")
    assert result.exit_code == 0, result.output
    text = document.read_text()
    assert "lamella reproduce --all --data DIR --size 0.5" in text
    assert "## lamina-table3: " in text
    assert str(data) not in text
