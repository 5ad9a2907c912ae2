"""A data directory: what is there, what is missing, and what stands for a missing trace."""

import gzip
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.bench.lengths import LengthPair
from services.reproduce.data import DataFiles, PublishedLength, PublishedLengths, lengths_of

PUBLISHED = PublishedLengths("Table 1", PublishedLength(686, 417), PublishedLength(197, 139), 4096)
TRACE = "num_prefill_tokens,num_decode_tokens\n10,20\n30,40\n50,60\n"


def test_a_file_is_found_by_path_or_name_plain_or_gzipped(tmp_path: Path) -> None:
    files = DataFiles(tmp_path)
    assert files.find("vidur/some.csv.gz") is None
    beside = tmp_path / "some.csv.gz"
    beside.write_bytes(gzip.compress(b"x"))
    assert files.find("vidur/some.csv.gz") == beside
    (tmp_path / "vidur").mkdir()
    below = tmp_path / "vidur" / "some.csv"
    below.write_text("x")
    assert files.find("vidur/some.csv") == below


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_file_that_must_be_there_is_named(tmp_path: Path, has_directory: bool) -> None:
    with pytest.raises(ConfigError, match=r"--data .*splitwise/perf_model\.csv"):
        DataFiles(tmp_path if has_directory else None).require("splitwise/perf_model.csv")


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        DataFiles(tmp_path / "nothing")


def test_a_missing_trace_is_drawn_with_the_published_means_and_says_so(tmp_path: Path) -> None:
    found = lengths_of(DataFiles(tmp_path), "chat.csv", PUBLISHED, 4000)
    assert len(found.pairs) == 4000
    assert found.mean_prompt == pytest.approx(686, rel=0.01)
    assert found.mean_output == pytest.approx(197, rel=0.02)
    assert max(each.prompt_tokens + each.output_tokens for each in found.pairs) <= 4096
    assert "chat.csv is not there" in found.described
    assert "Table 1" in found.described
    assert found == lengths_of(DataFiles(tmp_path), "chat.csv", PUBLISHED, 4000)


def test_a_trace_gives_its_own_lengths(tmp_path: Path) -> None:
    (tmp_path / "chat.csv").write_text(TRACE)
    found = lengths_of(DataFiles(tmp_path), "chat.csv", PUBLISHED, 6)
    own = {LengthPair(10, 20), LengthPair(30, 40), LengthPair(50, 60)}
    # All of them before any again.
    assert set(found.pairs[:3]) == set(found.pairs[3:]) == own
    assert found.described.startswith("6 requests, lengths drawn from chat.csv; 30.0 prompt and 40.0 output")


def test_a_length_without_a_median_has_the_assumed_spread() -> None:
    assert PublishedLength(100).sigma == 1.0
    assert PublishedLength(686, 417).sigma == pytest.approx(0.998, abs=0.001)
