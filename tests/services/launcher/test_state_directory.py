"""What a local mesh keeps on disk, where the disk takes nothing."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import LauncherError
from services.launcher.state_directory import write_private


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made and hold nothing, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_is_named_and_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    write_private(file, b"before")
    with full_disk(), pytest.raises(LauncherError, match=r"mesh\.toml cannot be written: "):
        write_private(file, b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["mesh.toml"]
    assert file.read_bytes() == b"before"
