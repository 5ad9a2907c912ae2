"""What live meshes did stands beside what a paper prints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from common.errors import ConfigError
from services.compare.records import keep
from services.reproduce.catalogue import ROWS
from services.reproduce.measured import LiveRuns
from services.reproduce.row import NOT_MEASURED, Table
from tests.services.compare.test_figures import RUNS
from tests.services.reproduce.test_command import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for record in RUNS:
        keep(tmp_path / "runs.jsonl", record)
    return tmp_path


def table_of(folder: Path) -> Table:
    row = ROWS["tetriinfer-fig11"]
    assert row.measured is not None
    table = row.measured(LiveRuns(folder))
    assert table is not None
    return table


def test_each_configuration_is_held_against_the_coupled_one_of_its_round(folder: Path) -> None:
    table = table_of(folder)
    assert table.rows[0] == ("paper", "-44 %", "-40 %", "1.4")
    # TTFT is 0.5 and 0.25 times as long, JCT 0.83 and 0.5, resource time 1.2 and 1.1 times: medians of both.
    name = "measured: split, 3 requests not served, and 0 of the coupled one's"
    assert table.rows[1:] == ((name, "-62%", "-33%", "0.87"),)
    assert "against coupled; rounds: 2" in table.title


def test_whichever_ran_first_the_coupled_one_is_what_others_are_held_against(tmp_path: Path) -> None:
    first = msgspec.structs.replace(RUNS[0], configuration="coupled-prefill-first")
    for record in (RUNS[1], RUNS[0], first):
        keep(tmp_path / "runs.jsonl", record)
    table = table_of(tmp_path)
    assert "against coupled-prefill-first" in table.title
    assert [row[0].split(",")[0] for row in table.rows] == ["paper", "measured: coupled", "measured: split"]


def test_another_rate_is_told(tmp_path: Path) -> None:
    for record in (RUNS[0], msgspec.structs.replace(RUNS[0], configuration="other", rate_per_s=2.5)):
        keep(tmp_path / "runs.jsonl", record)
    assert table_of(tmp_path).rows[1][0] == "measured: other, at 2.5 requests/s beside 1"


def test_the_command_prints_it_below_what_was_simulated(folder: Path) -> None:
    result = run("tetriinfer-fig11", "--measured", folder, "--size", "0.05")
    assert result.exit_code == 0, result.output
    assert result.output.index("ours: RoCE") < result.output.index("measured: split")
    assert "measured: " not in run("tetriinfer-fig11", "--size", "0.05").output


def test_all_of_them_have_it_where_it_was_measured_and_else_say_that_it_was_not(
    folder: Path, tmp_path: Path, keep_rows: Callable[..., None]
) -> None:
    keep_rows("lamina-table3", "tetriinfer-fig11", "tetriinfer-fig12")
    document = tmp_path / "reproduction.md"
    options = ("--size", "0.05", "--workers", "1", "--output", document)
    run("--all", "--measured", folder, *options)
    text = document.read_text()
    assert "lamella reproduce --all --data DIR --measured DIR --size 0.05" in text
    assert text.count("measured: split") == 1
    assert text.count("mean JCT | -") == 2, "both are simulated"
    _, after = text.split("## tetriinfer-fig12")
    assert NOT_MEASURED in after
    assert text.count(NOT_MEASURED) == 1


@pytest.mark.parametrize(
    ("row", "content", "said"),
    [
        ("tetriinfer-fig12", None, "has no runs of a coupled and another configuration"),
        ("lamina-table3", None, "is of tetriinfer-fig11, .*: lamina-table3 needs other hardware"),
        ("tetriinfer-fig11", b"{}\n", "line 1 cannot be read"),
        ("tetriinfer-fig11", b"\xff\n", "line 1 cannot be read"),
        ("tetriinfer-fig11", b"", "has no runs of a coupled and another"),
    ],
)
def test_a_folder_that_says_nothing_of_it_is_refused(
    folder: Path, row: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (folder / "runs.jsonl").write_bytes(content)
    error = run(row, "--measured", folder).exception
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=said):
        raise error


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    error = run("tetriinfer-fig11", "--measured", tmp_path / "nowhere").exception
    assert isinstance(error, ConfigError)
    assert "must be a folder of `lamella compare`" in str(error)


def test_of_a_run_without_anything_served_nothing_is_said(tmp_path: Path) -> None:
    first = RUNS[0]
    nothing = replace(first.load, ttft=None, end_to_end=None)
    keep(tmp_path / "runs.jsonl", first)
    other = msgspec.structs.replace(first, configuration="other", load=nothing, resource_time_s=0.0)
    keep(tmp_path / "runs.jsonl", other)
    assert table_of(tmp_path).rows[1] == ("measured: other", "-", "-", "-")
