"""What a table refuses, and how it says so."""

import gzip
from pathlib import Path

import pytest

from services.simulator.performance.files import PerformanceFileError, read_table

GOOD = "size,time\n1,2.5\n2,3.5\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.csv"


def test_columns_are_read_plain_and_gzipped(path: Path) -> None:
    path.write_text(GOOD)
    zipped = path.with_suffix(".csv.gz")
    zipped.write_bytes(gzip.compress(GOOD.encode()))
    for each in (path, zipped):
        table = read_table(each, ("time", "size"), ("absent",))
        assert table.numbers("time").tolist() == [2.5, 3.5]
        assert table.select(size=2.0).numbers("time").tolist() == [3.5]
        assert table.select(size="1").texts("time") == ["2.5"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("size,time\n", "no rows"),
        ("size,hour\n1,2\n", "column time: is missing; the header has size, hour"),
        ("size,time\n1,2\n3\n", "row 3: has 1 cells, the header 2"),
        ("size,time\n1,2\n3,soon\n", "column time, row 3: 'soon': must be a number"),
        ("size,time\n1,nan\n", "column time, row 2: 'nan': must be a number over 0"),
        ("size,time\n1,2\n1,0\n", "column time, row 3: '0': must be a number over 0"),
    ],
)
def test_what_breaks_a_rule_is_named_by_file_column_and_row(path: Path, content: str, said: str) -> None:
    path.write_text(content)
    with pytest.raises(PerformanceFileError) as caught:
        read_table(path, ("size", "time")).numbers("time", above=0)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_value_that_no_row_has_is_refused_with_those_that_there_are(path: Path) -> None:
    path.write_text(GOOD)
    with pytest.raises(PerformanceFileError, match=r"column size: has no row with 4\.0; has 1, 2"):
        read_table(path, ("size", "time")).select(size=4.0)


def test_what_is_no_table_is_refused(path: Path) -> None:
    with pytest.raises(PerformanceFileError, match="cannot be read"):
        read_table(path, ("size",))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PerformanceFileError, match="cannot be read"):
        read_table(path, ("size",))
    broken = path.with_suffix(".gz")
    broken.write_bytes(gzip.compress(GOOD.encode())[:-9])
    with pytest.raises(PerformanceFileError, match="cannot be read"):
        read_table(broken, ("size",))
