"""What a local mesh keeps on disk, where the disk takes nothing."""

import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import LauncherError
from services.launcher.state_directory import ProcessIdentity, StateDirectory, end_process, write_private


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


@pytest.mark.parametrize("pid", [-1, 0, 1 << 31, 1 << 70, "one"])
def test_a_list_of_what_can_be_no_process_is_damaged(tmp_path: Path, pid: object) -> None:
    """The next start ended in a traceback, and every one after it."""
    state = StateDirectory(tmp_path)
    listed = {"service_id": "decode-0", "role": "decode", "pid": pid, "start_ticks": 1}
    state.processes_file.write_text(json.dumps([listed]))
    assert state.read_processes() == []
    state.processes_file.write_text(json.dumps([{**listed, "pid": 4_194_305}]))
    [gone] = state.read_processes()
    end_process(gone, grace_s=0.0)


def test_a_number_that_is_a_threads_now_is_nobody_to_end() -> None:
    with_id, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with_id.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    with_id.wait()
    try:
        assert thread.native_id is not None
        end_process(ProcessIdentity("decode-0", "decode", thread.native_id, 1), grace_s=0.0)
    finally:
        may_end.set()
        thread.join()
