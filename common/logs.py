"""Logs: one JSON object a line on standard error; before somebody's eyes, one line of words instead.

``event`` is a constant name, everything that varies is a field (``extra=``). Prompts, completions and
credentials are never logged; ids, counts and sizes are. A line about one request has its id as ``request``,
one about several has theirs as ``requests``.
"""

import datetime
import logging
import sys
from typing import Any

import msgspec

STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}

_encode = msgspec.json.Encoder(enc_hook=str).encode


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in STANDARD_FIELDS}


def request_field(message: object) -> dict[str, str]:
    """For a line about a message: the id of the one request that the message is about, if it is about one."""
    request_id = getattr(getattr(message, "request", message), "request_id", None)
    return {} if request_id is None else {"request": request_id}


class JsonFormatter(logging.Formatter):
    """Escapes every value, so no value can start a line of its own."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(_fields(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line).decode()


class TerminalFormatter(logging.Formatter):
    """``process_died: id="decode-0", status=-9``. Values are escaped as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        values = ", ".join(f"{key}={_encode(value).decode()}" for key, value in _fields(record).items())
        line = f"{record.getMessage()}: {values}" if values else record.getMessage()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure_terminal_logging(informative: str) -> None:
    """For a command in the foreground: warnings, and whatever the logger ``informative`` says."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(TerminalFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[stream], force=True)
    logging.getLogger(informative).setLevel(logging.INFO)


def configure_logging(service: str, level: int = logging.INFO) -> None:
    """Replaces what was configured. ``service`` is in every line."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[stream], force=True)
    # One line a request, and the metrics say it better.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("nats").setLevel(logging.CRITICAL)
