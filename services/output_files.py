"""Files that commands write: tried before the work that they are of is begun, and replaced whole."""

import os
from pathlib import Path

from common.errors import ConfigError


def check_writable(option: str, path: Path) -> None:
    """Before anything is measured for nothing. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(option, str(path), "is a directory")
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
    """Replaces the file in one step, so that an interrupted command leaves no half of one."""
    unfinished = _unfinished(path)
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(option, str(path), f"cannot be written ({exc.strerror})") from exc


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
