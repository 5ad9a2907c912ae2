"""Files that commands write: tried before the work that they are of is begun, and replaced whole.

A symlink stays, what it leads to is replaced. Devices, FIFOs and the command's own output (/dev/stdout) hold
no file that could be replaced: they are written to as they are.
"""

import errno
import os
import stat
import sys
from pathlib import Path

from common.errors import ConfigError

STANDARD_STREAMS = (1, 2)


def check_writable(option: str, path: Path) -> None:
    """Before anything is measured for nothing. Raises ConfigError."""
    if is_stream(option, path):
        if _standard_stream(path) is None and not os.access(path, os.W_OK):
            raise ConfigError(option, str(path), f"cannot be written ({os.strerror(errno.EACCES)})")
    else:
        _try(option, path, _unfinished(path))


def check_folder(option: str, path: Path) -> None:
    """That files can be written there, in a folder that is or can be made. Raises ConfigError."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))
    if not there.is_dir():
        raise ConfigError(option, str(path), f"cannot be made: {there} is no directory")
    _try(option, path, _unfinished(there / "written"))


def _try(option: str, path: Path, unfinished: Path) -> None:
    try:
        unfinished.touch()
        unfinished.unlink()
    except OSError as exc:
        raise ConfigError(option, str(path), f"cannot be written ({exc.strerror})") from exc


def write_whole(option: str, path: Path, content: bytes) -> None:
    """Replaces a file in one step, so that an interrupted command leaves no half of one."""
    if is_stream(option, path):
        _write_through(option, path, content)
        return
    unfinished = _unfinished(path)
    try:
        unfinished.write_bytes(content)
        unfinished.replace(os.path.realpath(path))
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(option, str(path), f"cannot be written ({exc.strerror})") from exc


def is_stream(option: str, path: Path) -> bool:
    """Whether it takes bytes without being replaced. Raises ConfigError for what takes none."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise ConfigError(option, str(path), f"cannot be written ({exc.strerror})") from exc
    if stat.S_ISDIR(mode):
        raise ConfigError(option, str(path), "is a directory")
    if _standard_stream(path) is not None or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return True
    if not stat.S_ISREG(mode):
        raise ConfigError(option, str(path), "must be a file, a FIFO or a character device")
    return False


def _standard_stream(path: Path) -> int | None:
    """The descriptor of the command's own output, should the path be it: also where a shell has redirected
    it to a file, of which a replacement would take what is printed."""
    for descriptor in STANDARD_STREAMS:
        try:
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except OSError:
            continue
    return None


def _write_through(option: str, path: Path, content: bytes) -> None:
    """Never creates: a device that was unplugged meanwhile must not become a file. Standard streams are
    shared, so that what is printed before and after keeps its place."""
    own = _standard_stream(path)
    try:
        if own is not None:
            sys.stdout.flush()
            sys.stderr.flush()
        with open(os.open(path, os.O_WRONLY) if own is None else os.dup(own), "wb") as stream:
            stream.write(content)
    except OSError as exc:
        raise ConfigError(option, str(path), f"cannot be written ({exc.strerror})") from exc


def _unfinished(path: Path) -> Path:
    """Beside what a symlink leads to: only there can a file take its place in one step."""
    target = Path(os.path.realpath(path))
    return target.with_name(f".{target.name}.{os.getpid()}")
