"""Points that were simulated, kept in a file as they come: what was interrupted goes on where it was."""

from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from common.errors import ConfigError
from services.planner.probes import Point

BEGINNING = b'{"key":"'
"""Of every line."""


class KeptPoint(msgspec.Struct, frozen=True):
    """A line of the file."""

    key: str
    point: Point


def _begins_as_ours(line: bytes) -> bool:
    return line[: len(BEGINNING)] == BEGINNING[: len(line)]


class Checkpoint:
    """Of any number of plans: a key says all that a point hangs on. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError where the file is none of these, or cannot be written."""
        self.path = path
        self.points: dict[str, Point] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            whole = self._read(content)
            self._file = path.open("ab")
            if whole < len(content):
                self._file.truncate(whole)
            elif content and not content.endswith(b"\n"):
                self._file.write(b"\n")
        except OSError as exc:
            raise ConfigError("--checkpoint", str(path), f"cannot be used ({exc.strerror})") from exc

    def _read(self, content: bytes) -> int:
        """How many bytes of it are whole lines."""
        lines = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                kept = msgspec.json.decode(line, type=KeptPoint)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                # A process that ends while it writes leaves a last line that stops short. A file that has
                # nothing else may be another one, of which nothing is to be lost.
                if number == len(lines) and (self.points or _begins_as_ours(line)):
                    return len(content) - len(line)
                rule = f"is no file of points: line {number}: {exc}"
                raise ConfigError("--checkpoint", str(self.path), rule) from exc
            self.points[kept.key] = kept.point
        return len(content)

    def keep(self, key: str, point: Point) -> None:
        self.points[key] = point
        if self._file is not None:
            self._file.write(msgspec.json.encode(KeptPoint(key, point)) + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
