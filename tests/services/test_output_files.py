"""Files of commands: replaced whole where they are files, written to where they are none.

Device nodes are copies in the test's folder: were they replaced, nobody would miss them.
"""

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.output_files import check_writable, write_whole

NULL, FULL = os.makedev(1, 3), os.makedev(1, 7)


def device(path: Path, number: int, kind: int = stat.S_IFCHR) -> Path:
    try:
        os.mknod(path, kind | 0o666, number)
        os.close(os.open(path, os.O_WRONLY))
    except OSError as exc:
        pytest.skip(f"no device nodes here: {exc.strerror}")
    return path


def write(path: Path, content: bytes = b"new") -> None:
    check_writable("--json", path)
    write_whole("--json", path, content)


def test_a_file_is_made_or_replaced_with_nothing_beside_it(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path / "out.json")
    assert (tmp_path / "out.json").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_stays_and_what_it_leads_to_is_replaced(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target.json", tmp_path / "link.json"
    if exists:
        target.write_bytes(b"old")
    (tmp_path / "middle.json").symlink_to(target)
    link.symlink_to("middle.json")
    write(link)
    assert link.is_symlink()
    assert (tmp_path / "middle.json").is_symlink()
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "elsewhere") == ["target.json"]


def test_a_circle_of_symlinks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="--json"):
        check_writable("--json", tmp_path / "a")


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_fifo_is_written_to(tmp_path: Path, is_linked: bool) -> None:
    fifo, read = tmp_path / "fifo", list[bytes]()
    os.mkfifo(fifo)
    given = fifo
    if is_linked:
        given = tmp_path / "link"
        given.symlink_to(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write(given)
    reader.join(timeout=10)
    assert read == [b"new"]
    assert fifo.is_fifo()


def test_a_character_device_is_written_to_with_no_file_beside_it(tmp_path: Path) -> None:
    null = device(tmp_path / "null", NULL)
    tmp_path.chmod(0o555)
    write(null)
    tmp_path.chmod(0o755)
    assert null.is_char_device()
    assert os.listdir(tmp_path) == ["null"]


def test_a_full_device_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    full = device(tmp_path / "full", FULL)
    with pytest.raises(ConfigError, match=r"--json = .*full.* cannot be written \(No space left on device\)"):
        write(full)
    assert full.is_char_device()


def test_sockets_and_folders_are_refused_before_and_stay(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for act in (check_writable, lambda option, path: write_whole(option, path, b"new")):
            with pytest.raises(ConfigError, match="a FIFO or a character device"):
                act("--json", tmp_path / "socket")
            with pytest.raises(ConfigError, match="is a directory"):
                act("--json", tmp_path)
    assert (tmp_path / "socket").is_socket()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        check_writable("--json", tmp_path / "nowhere" / "out.json")


PRINTS_AROUND = """
import sys
from pathlib import Path
from services.output_files import check_writable, write_whole
print("before")
check_writable("--json", Path(sys.argv[1]))
write_whole("--json", Path(sys.argv[1]), b"written\\n")
print("after")
"""


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/1"])
def test_the_standard_output_is_written_to_in_its_turn_be_it_a_pipe_or_a_file(
    tmp_path: Path, path: str
) -> None:
    command = [sys.executable, "-c", PRINTS_AROUND, path]
    piped = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with (tmp_path / "stdout").open("wb") as redirected:
        subprocess.run(command, stdout=redirected, check=True)
    assert piped == (tmp_path / "stdout").read_bytes() == b"before\nwritten\nafter\n"
    assert os.listdir(tmp_path) == ["stdout"]
