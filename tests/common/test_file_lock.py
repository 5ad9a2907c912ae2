"""What is made under a lock is there whole, or not at all."""

from pathlib import Path

import pytest

from common.file_lock import scratch_for


def test_what_is_complete_takes_its_place(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with scratch_for(target) as scratch:
        (scratch / "weights").write_text("all")
        scratch.rename(target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "all"


def test_of_what_fails_nothing_stays(tmp_path: Path) -> None:
    def fail() -> None:
        with scratch_for(tmp_path / "model") as scratch:
            (scratch / "weights").write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_others_make_stays(tmp_path: Path) -> None:
    for name in (".converting-model-abc", ".converting-other-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    with scratch_for(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".converting-other-abc"]
